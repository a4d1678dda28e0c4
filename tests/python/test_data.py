"""Text, tokenizers and batches; every message of bad input is asserted word for word."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from interlace.data import DataError, TokenDataset, Tokenizer, find_text, prepare_tokens, read_text
from interlace.data import text as text_module
from interlace.data.dataset import permuted


def message(call, *args, **kwargs) -> str:
    with pytest.raises(DataError) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# ---- text ----


def test_default_text_is_the_standard_library():
    text = find_text()
    assert len(text.files) > 200 and text.bytes > 4_000_000
    assert not {"site-packages", "test", "tests"} & {part for file in text.files for part in file.parts}
    assert list(text.files) == list(find_text().files)


@pytest.mark.parametrize(
    "data, said",
    [
        (b"", "{file} is empty: give a file with text in it"),
        (b"hello\0world", "{file} is a binary file (a zero byte at position 5): give UTF-8 text"),
        (
            b"caf\xe9 au lait",
            "{file} is not UTF-8 text: byte 0xe9 at position 3; convert it first, for example: "
            "iconv -f latin1 -t utf-8 {file}",
        ),
        ("käse".encode("utf-16"), "{file} is UTF-16 text; convert it first: iconv -f utf-16 -t utf-8 {file}"),
        (
            b"ends in half a character \xc3",
            "{file} is not UTF-8 text: byte 0xc3 at position 25; convert it first, for example: "
            "iconv -f latin1 -t utf-8 {file}",
        ),
    ],
)
def test_wrong_file(tmp_path, data, said):
    file = write(tmp_path / "text.txt", data)
    assert message(lambda: [*map(list, map(read_text, find_text(file).files))]) == said.format(file=file)


def test_wrong_byte_position_counts_over_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "PIECE_BYTES", 7)
    file = write(tmp_path / "text.txt", "ääääääääää".encode() + b"\xff!")
    assert "byte 0xff at position 20;" in message(lambda: list(read_text(file)))
    nul = write(tmp_path / "nul.txt", b"a" * 30 + b"\0")
    assert "(a zero byte at position 30)" in message(lambda: list(read_text(nul)))


def test_missing_and_special(tmp_path):
    assert message(find_text, tmp_path / "no.txt") == f"no such file or folder: {tmp_path / 'no.txt'}"
    os.mkfifo(tmp_path / "pipe")
    assert message(find_text, tmp_path / "pipe") == (
        f"{tmp_path / 'pipe'} is neither a file nor a folder: give a text file or a folder of text files"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(tmp_path):
    file = write(tmp_path / "a.txt", b"text")
    file.chmod(0)
    assert message(lambda: list(read_text(file))) == f"cannot read {file}: Permission denied"


def test_folder_skips_what_is_not_text_and_keeps_an_order(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "two.txt", b"two")
    write(tmp_path / "one.txt", b"one")
    write(tmp_path / "picture.png", b"\x89PNG\0")
    write(tmp_path / ".hidden", b"hidden")
    text = find_text(tmp_path)
    assert [file.name for file in text.files] == ["one.txt", "two.txt"]
    assert [file.name for file in text.skipped] == ["picture.png"]
    assert text.bytes == 6


def test_folder_without_text(tmp_path):
    assert message(find_text, tmp_path) == f"the folder {tmp_path} is empty: give a folder with UTF-8 text files in it"
    write(tmp_path / "picture.png", b"\x89PNG\0")
    assert message(find_text, tmp_path) == (
        f"the folder {tmp_path} has no text files (1 looked at are binary or empty): "
        "give a folder with UTF-8 text files in it"
    )


def test_pieces_join_to_the_text(tmp_path, monkeypatch):
    content = "a line with ümläuts\n" * 50 + "x" * 500 + "\nlast"
    file = write(tmp_path / "text.txt", b"\xef\xbb\xbf" + content.encode())
    for size in (1, 3, 64, 1 << 18):
        monkeypatch.setattr(text_module, "PIECE_BYTES", size)
        assert "".join(read_text(file)) == content


# ---- tokenizers ----


def test_byte_tokens_are_bytes():
    tokenizer = Tokenizer.byte()
    text = "Grüße\n\t\x7f 日本"
    (ids,) = tokenizer.encode([text])
    assert bytes(ids.tolist()) == text.encode()
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    # The saved form, which Hugging Face reads, gives the same ids.
    assert tokenizer.inner.encode(text).ids == ids.tolist()
    assert tokenizer.decode(ids.tolist()) == text


def test_bpe_round_trip_and_transformers_reads_it(tmp_path):
    source = find_text().files[:40]
    tokenizer = Tokenizer.train_bpe((piece for file in source for piece in read_text(file)), 600)
    assert tokenizer.vocab_size == 600
    text = "def run(self, größe):\n    return 1\n"
    (ids,) = tokenizer.encode([text])
    assert len(ids) < len(text.encode()) and tokenizer.decode(ids.tolist()) == text
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.digest == tokenizer.digest and again.kind == "bpe"
    transformers = pytest.importorskip("transformers")
    assert (
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")).encode(text)
        == ids.tolist()
    )


def test_tokenizer_messages(tmp_path):
    assert message(Tokenizer.train_bpe, iter(["text"]), 100) == (
        "--vocab 100 is too small for a BPE: it needs at least 257 (256 bytes and <|end|>)"
    )
    file = write(tmp_path / "tokenizer.json", b"{}")
    assert message(Tokenizer.load, file).startswith(f"{file} is not a tokenizer file: ")


# ---- token files ----


def test_token_file_is_cached_and_survives_damage(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    write(folder / "a.txt", b"abc\n")
    write(folder / "b.txt", "dé".encode())
    calls = []
    made = prepare_tokens(find_text(folder), tmp_path / "cache", progress=lambda *done: calls.append(done))
    assert made.open().tolist() == [*b"abc\n", 256, *"dé".encode(), 256]
    assert calls[-1][0] == "tokenizing"
    calls.clear()
    again = prepare_tokens(find_text(folder), tmp_path / "cache", progress=lambda *done: calls.append(done))
    assert not calls and again.digest == made.digest and again.path == made.path
    os.truncate(made.path, 3)
    repaired = prepare_tokens(find_text(folder), tmp_path / "cache")
    assert repaired.digest == made.digest and repaired.open().tolist() == [*b"abc\n", 256, *"dé".encode(), 256]
    made.path.with_suffix(".json").write_text("{ not json")
    assert prepare_tokens(find_text(folder), tmp_path / "cache").digest == made.digest
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_failed_tokenizing_leaves_no_partial_file(tmp_path):
    file = write(tmp_path / "text.txt", b"a" * 20000 + b"\0")
    assert "binary file" in message(prepare_tokens, find_text(file), tmp_path / "cache")
    assert not [f for f in (tmp_path / "cache").iterdir() if f.suffix != ".lock"]


def test_unknown_tokenizer_and_unwritable_cache(tmp_path):
    file = write(tmp_path / "text.txt", b"abc")
    assert message(prepare_tokens, find_text(file), tmp_path / "c", "words") == "unknown tokenizer 'words': byte or bpe"
    assert message(prepare_tokens, find_text(file), file / "cache") == (
        f"cannot write the tokens in {file / 'cache'}: Not a directory"
    )


# ---- batches ----


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 65, 1000])
def test_permutation_visits_each_once(size):
    order = permuted(np.arange(size), size, seed=3, epoch=1)
    assert sorted(order.tolist()) == list(range(size))
    if size >= 17:
        assert order.tolist() != permuted(np.arange(size), size, seed=3, epoch=2).tolist()
        assert order.tolist() != permuted(np.arange(size), size, seed=4, epoch=1).tolist()


def test_order_is_pinned():
    """The data order is part of what a seed means: a change here breaks resuming of saved runs."""
    assert permuted(np.arange(10), 10, seed=0, epoch=0).tolist() == [2, 5, 1, 4, 3, 6, 9, 8, 0, 7]


def test_global_batch_does_not_depend_on_ranks():
    data = TokenDataset(np.arange(1000) % 251, seq=7, batch=12, seed=5)
    for step in (0, 3, 11, 12, 40):  # 142 windows: an epoch ends inside step 11
        whole = data.batch_at(step)
        for world in (1, 2, 3, 4, 6):
            parts = [data.batch_at(step, rank, world) for rank in range(world)]
            for side in (0, 1):
                assert np.array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_labels_are_the_next_tokens_and_epochs_cover_the_text():
    data = TokenDataset(np.arange(101), seq=10, batch=5)
    seen = []
    for step in range(2):
        inputs, labels = data.batch_at(step)
        assert inputs.shape == labels.shape == (5, 10) and str(inputs.dtype) == "torch.int64"
        assert (labels == inputs + 1).all()
        seen += inputs.flatten().tolist()
    assert sorted(seen) == list(range(100))


def test_dataset_messages():
    assert message(TokenDataset, np.arange(50), 64, 8) == (
        "the text has 50 tokens, too few for one sequence of 64 (and the token after it): "
        "give a longer text or --seq 49"
    )
    assert message(TokenDataset, np.arange(1), 64, 8) == (
        "the text has 1 tokens, too few for one sequence of 64 (and the token after it): give a longer text"
    )
    assert message(TokenDataset(np.arange(50), 4, 8).batch_at, 0, 0, 3) == (
        "--batch 8 is not a multiple of 3 ranks: use 6 or 9"
    )
    assert message(TokenDataset, np.arange(50), 0, 8) == "--seq 0 and --batch 8 must be at least 1"
