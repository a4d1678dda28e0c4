"""Checkpoints: files with checksums, folders put in place whole, writing beside the steps, PyTorch's and Hugging Face's forms."""
