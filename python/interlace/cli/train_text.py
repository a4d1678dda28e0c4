"""The text of `interlace train` as batches: prepared once and kept, or as it is read (--stream); read on from where a run stood."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from interlace import private
from interlace.cli.console import Work
from interlace.cli.program_file import FileError, writable_folder
from interlace.cli.run_record import TOKENIZER_FILE, RunRecord
from interlace.cli.settings import SettingError, TrainSettings
from interlace.data import Place, TokenDataset, TokenFile, Tokenizer, TokenStream, find_text, prepare_tokenizer, prepare_tokens

Text = TokenFile | TokenStream
_ROWS_DEPEND_ON = ("seq", "shuffle_buffer", "pack", "seed", "eval_share")  # with another, a run goes on where its block began


def dataset(tokens: Text, settings: TrainSettings, record: RunRecord | None) -> TokenDataset | TokenStream:
    """The run's batches, from where it stood. Error: a text that ends before that place."""
    if isinstance(tokens, TokenStream):
        if record is None or record.stream is None:
            return tokens
        same = all(record.settings.get(name) == getattr(settings, name) for name in _ROWS_DEPEND_ON)
        place = Place(*record.stream)
        return dataclasses.replace(tokens, place=place if same else place._replace(row=0))
    origin = (0, 0) if record is None else (record.step, record.rows)
    trained_on = tokens.open()[: tokens.count - int(tokens.count * (settings.eval_share or 0.0))]
    data = TokenDataset(trained_on, settings.seq, settings.batch, settings.seed, origin)
    if record is not None and record.tokens > settings.seq:
        position = record.rows % ((record.tokens - 1) // settings.seq) * settings.seq
        if len(data.tokens) < position:
            raise SettingError(
                f"the run in {settings.resume} stands at token {position:,} of its text, but the text given has only {len(data.tokens):,} "
                "tokens: give a longer text, or begin a new run with --weights"
            )
    return data


def evaluated_on(tokens: Text, settings: TrainSettings) -> np.ndarray:
    """The tokens that are not trained on: of --eval-text, or the --eval-share of the text: its end, of a stream the documents by number."""
    if settings.eval_text is not None:
        text = find_text(settings.eval_text, settings.text_column)
        return prepare_tokens(text, cache_folder(), tokenizer=tokens.tokenizer).open()
    if isinstance(tokens, TokenStream):
        return dataclasses.replace(tokens, held_out=True).head(settings.eval_sequences * settings.seq + 1)
    return tokens.open()[tokens.count - int(tokens.count * (settings.eval_share or 0.0)) :]


def prepare_text(settings: TrainSettings, record: RunRecord | None, other_text: bool = False, work: Work | None = None) -> Text:
    """The text of the run; made by whoever comes first. A resumed run keeps its tokenizer and its text."""
    progress = work.update if work is not None else None
    tokenizer = None
    if settings.resume:
        tokenizer = Tokenizer.load(Path(settings.resume) / TOKENIZER_FILE)
    elif settings.tokenizer not in ("byte", "bpe"):
        tokenizer = Tokenizer.pretrained(settings.tokenizer)
    kind = "byte" if tokenizer is not None else settings.tokenizer
    text = find_text(settings.text, settings.text_column)
    tokens: Text
    if settings.stream:
        tokenizer = tokenizer or prepare_tokenizer(text, cache_folder(), kind, settings.vocab, progress)
        order = settings.seed, settings.shuffle_buffer, settings.pack, settings.eval_share or 0.0
        tokens = TokenStream(text, tokenizer, settings.seq, settings.batch, *order)
        if work is not None:  # the launcher looks, once for all ranks
            tokens.check()
    else:
        tokens = prepare_tokens(text, cache_folder(), kind, settings.vocab, tokenizer, progress)
    if record is not None and other_text:
        record.stream = None
    elif record is not None and tokens.digest != record.data_digest:
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
