"""The text of `interlace train` as batches: prepared once, kept from run to run, read on from where a run stood."""

from __future__ import annotations

from pathlib import Path

from interlace import private
from interlace.cli.console import Work
from interlace.cli.program_file import FileError, writable_folder
from interlace.cli.run_record import TOKENIZER_FILE, RunRecord
from interlace.cli.settings import SettingError, TrainSettings
from interlace.data import TokenDataset, TokenFile, Tokenizer, find_text, prepare_tokens


def dataset(tokens: TokenFile, settings: TrainSettings, record: RunRecord | None) -> TokenDataset:
    """The run's batches, from where it stood. Error: a text that ends before that place."""
    origin = (0, 0) if record is None else (record.step, record.rows)
    data = TokenDataset(tokens.open(), settings.seq, settings.batch, settings.seed, origin)
    if record is not None and record.tokens > settings.seq:
        position = record.rows % ((record.tokens - 1) // settings.seq) * settings.seq
        if tokens.count < position:
            raise SettingError(
                f"the run in {settings.resume} stands at token {position:,} of its text, but the text given has only {tokens.count:,} "
                "tokens: give a longer text, or begin a new run with --weights"
            )
    return data


def prepare_text(
    settings: TrainSettings, record: RunRecord | None, other_text: bool = False, work: Work | None = None
) -> TokenFile:
    """The token file of the run; made by whoever comes first. A resumed run keeps its tokenizer and its text."""
    progress = work.update if work is not None else None
    tokenizer = None
    if settings.resume:
        tokenizer = Tokenizer.load(Path(settings.resume) / TOKENIZER_FILE)
    elif settings.tokenizer not in ("byte", "bpe"):
        tokenizer = Tokenizer.pretrained(settings.tokenizer)
    kind = "byte" if tokenizer is not None else settings.tokenizer
    tokens = prepare_tokens(find_text(settings.text), cache_folder(), kind, settings.vocab, tokenizer, progress)
    if record is not None and not other_text and tokens.digest != record.data_digest:
        where = settings.text or "the standard library"
        raise SettingError(
            f"the text has changed since {settings.resume} was saved ({where}): put the old text back, or name one with --text"
        )
    return tokens


def cache_folder() -> Path:
    """Where token files and measurements are kept from run to run: the cache (private.py), or the temporary folder where that is closed.
    They are kept where compiled programs are not ("off"), too: a run needs them."""
    try:
        return writable_folder(private.make_folder(private.cache_folder() or private.user_folder()))
    except (FileError, OSError):
        return private.make_folder(private.temporary_folder())
