"""Interlace under the loops that people already have: transformers.Trainer, Lightning Fabric, Accelerate. Each module needs its library."""
