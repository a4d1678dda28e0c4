"""Text to batches: finding and checking text, tokenizers, cached token files, batches by (seed, step, rank), and from text as it is read."""

from interlace.data.dataset import TokenDataset
from interlace.data.stream import Place, TokenStream
from interlace.data.text import DataError, TextSource, find_text, read_text
from interlace.data.tokens import TokenFile, Tokenizer, prepare_tokenizer, prepare_tokens

__all__ = [
    "DataError", "Place", "TextSource", "TokenDataset", "TokenFile", "TokenStream", "Tokenizer", "find_text", "prepare_tokenizer",
    "prepare_tokens", "read_text",
]  # fmt: skip
