"""Text to batches: finding and checking text, tokenizers, cached token files, and batches by (seed, step, rank)."""

from interlace.data.dataset import TokenDataset
from interlace.data.text import DataError, TextSource, find_text, read_text
from interlace.data.tokens import TokenFile, Tokenizer, prepare_tokens

__all__ = [
    "DataError", "TextSource", "TokenDataset", "TokenFile", "Tokenizer", "find_text", "prepare_tokens", "read_text",
]  # fmt: skip
