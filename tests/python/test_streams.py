"""`interlace train --stream`: texts that are tokenized while they are trained on, real files with a real tokenizer, on one rank and two."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch

from interlace.data import DataError, Place, Tokenizer, TokenStream, find_text, read_text

SOURCES = find_text().files[:30]
DOCUMENTS = [part for file in SOURCES for text in read_text(file) for part in text.split("\n\n") if part.strip()]
TINY = ["--model", "llama-tiny", "--steps", "6", "--batch", "8", "--seq", "32", "--dtype", "fp64", "--schedule", "none", "--json"]


def write_lines(file: Path, documents: list[str], name: str = "text") -> Path:
    file.write_text("".join(json.dumps({"id": i, name: d}) + "\n" for i, d in enumerate(documents)))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus of three files, and a tokenizer that `tokenizers` trained."""
    import tokenizers

    path = tmp_path_factory.mktemp("streams")
    (path / "corpus").mkdir()
    third = len(DOCUMENTS) // 3
    write_lines(path / "corpus" / "a.jsonl", DOCUMENTS[:third])
    write_lines(path / "corpus" / "b.ndjson", DOCUMENTS[third : 2 * third])
    (path / "corpus" / "c.txt").write_text("\n\n".join(DOCUMENTS[2 * third :]))
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.train_from_iterator(DOCUMENTS, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"]))
    (path / "tokenizer").mkdir()
    inner.save(str(path / "tokenizer" / "tokenizer.json"))
    return path


def joined(folder: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of the corpus, documents ended by the end-of-text token: what packed rows are windows of."""
    found = []
    for file in find_text(folder / "corpus").files:
        texts = [file.read_text()] if file.suffix == ".txt" else [json.loads(line)["text"] for line in file.read_text().splitlines()]
        for ids in tokenizer.encode(texts):
            found += [ids, np.array([tokenizer.end_id])]
    return np.concatenate(found)


def stream(folder: Path, **options: Any) -> TokenStream:
    source = options.pop("source", folder / "corpus")
    return TokenStream(find_text(source), Tokenizer.pretrained(folder / "tokenizer"), seq=32, batch=8, **options)


def rows_of(found: TokenStream, steps: int) -> torch.Tensor:
    return torch.cat([found.batch_at(step)[0] for step in range(steps)])


# ---- rows ----


def test_packed_rows_are_windows_of_the_joined_documents(folder: Path) -> None:
    found = stream(folder, shuffle=1)
    expected = torch.from_numpy(joined(folder, found.tokenizer).astype(np.int64))
    steps = (len(expected) - 1) // (32 * 8)
    assert steps > 20
    inputs, labels = zip(*[found.batch_at(step) for step in range(steps)], strict=True)
    assert torch.equal(torch.cat(inputs).flatten(), expected[: steps * 256])
    assert torch.equal(torch.cat(labels).flatten(), expected[1 : steps * 256 + 1])
    found.batch_at(steps)
    assert found.where().startswith("epoch 2,"), found.where()


def test_shuffling_moves_whole_rows_within_a_block(folder: Path) -> None:
    source = folder / "corpus" / "a.jsonl"
    plain, mixed, other = (
        rows_of(stream(folder, source=source, shuffle=size, seed=seed), 8) for size, seed in ((1, 0), (32, 0), (32, 1))
    )
    assert not torch.equal(plain, mixed) and not torch.equal(mixed, other)
    for block in (slice(0, 32), slice(32, 64)):
        assert sorted(plain[block].tolist()) == sorted(mixed[block].tolist()) == sorted(other[block].tolist())


@pytest.mark.parametrize("pack", [True, False])
def test_a_batch_is_the_same_on_any_number_of_ranks(folder: Path, pack: bool) -> None:
    whole, ranks = stream(folder, pack=pack, shuffle=24), [stream(folder, pack=pack, shuffle=24) for _ in range(4)]
    for step in range(5):
        parts = [found.batch_at(step, rank, 4) for rank, found in enumerate(ranks)]
        for part, expected in zip(zip(*parts, strict=True), whole.batch_at(step), strict=True):
            assert torch.equal(torch.cat(part), expected)


@pytest.mark.parametrize("pack", [True, False])
def test_it_goes_on_from_any_place(folder: Path, pack: bool) -> None:
    options = {"source": folder / "corpus" / "b.ndjson", "pack": pack, "shuffle": 20, "share": 0.2, "seed": 3}
    whole = stream(folder, **options)
    batches, places = [], [whole.place]
    while whole.place.epoch < 2:
        batches.append(whole.batch_at(len(batches)))
        places.append(Place(*json.loads(json.dumps(whole.place))))
    assert len({place.block for place in places}) > 5
    for step in range(0, len(batches), 5):
        again = stream(folder, **options, place=places[step])
        for i in range(step, min(step + 4, len(batches))):
            assert all(torch.equal(a, b) for a, b in zip(again.batch_at(i), batches[i], strict=True)), (step, i)


def test_a_document_a_row_and_its_weights(folder: Path) -> None:
    found = stream(folder, source=folder / "corpus" / "a.jsonl", pack=False, shuffle=1)
    encoded = found.tokenizer.encode(DOCUMENTS[:200])
    rows = [[*ids, found.tokenizer.end_id][i : i + 33] for ids in encoded for i in range(0, len(ids), 32)]
    assert any(len(row) < 33 for row in rows) and len(rows) > 200, "short documents and long ones"
    for step in range(10):
        inputs, labels, weights = found.batch_at(step)
        assert weights.mean().item() == pytest.approx(1.0)
        for row, x, y, w in zip(rows[step * 8 :], inputs, labels, weights, strict=False):
            targets = len(row) - 1
            assert x[:targets].tolist() == row[:-1] and y[:targets].tolist() == row[1:]
            assert (w[:targets] == w[0]).all() and w[0] > 0 and (w[targets:] == 0).all()


def test_what_is_held_out_is_not_trained_on(folder: Path) -> None:
    source = write_lines(folder / "numbered.jsonl", [f"document {i} of many" for i in range(400)])
    shares = {"trained on": stream(folder, source=source, share=0.25), "held out": stream(folder, source=source, share=0.25, held_out=True)}
    end, texts = shares["held out"].tokenizer.end_id, {}
    for name, found in shares.items():
        tokens = found.head(1 << 20).tolist()
        texts[name] = set(" ".join("." if token == end else str(token) for token in tokens).split(".")) - {""}
        assert tokens.count(end) == len(texts[name])
    assert not texts["trained on"] & texts["held out"] and sum(map(len, texts.values())) == 400
    assert 60 < len(texts["held out"]) < 140


def test_only_what_is_needed_is_read(folder: Path) -> None:
    """A text whose end cannot be read: what stands before it is trained on, and the error names file and line when it is reached."""
    file = write_lines(folder / "broken.jsonl", DOCUMENTS[:300])
    file.write_text(file.read_text() + "[1, 2]\n")
    found = stream(folder, source=file, shuffle=16)
    with pytest.raises(DataError) as raised:
        for step in range(10_000):
            found.batch_at(step)
    assert step > 5
    assert str(raised.value) == f'{file}, line 301 is a list: each line must be an object such as {{"text": "..."}}'


def test_parquet_and_compressed_lines(folder: Path) -> None:
    pytest.importorskip("datasets", reason="pip install 'interlace[data]'")
    import gzip

    import pyarrow
    from pyarrow import parquet

    documents = DOCUMENTS[:400]
    write_lines(folder / "plain.jsonl", documents, "body")
    parquet.write_table(pyarrow.table({"id": range(400), "body": documents}), folder / "rows.parquet", row_group_size=150)
    with gzip.open(folder / "lines.jsonl.gz", "wb") as out:
        out.write((folder / "plain.jsonl").read_bytes())
    tokenizer = Tokenizer.pretrained(folder / "tokenizer")
    expected = TokenStream(find_text(folder / "plain.jsonl", "body"), tokenizer, 32, 8)
    batches = [expected.batch_at(step)[0] for step in range(9)]
    for name in ("rows.parquet", "lines.jsonl.gz"):
        found = TokenStream(find_text(folder / name, "body"), tokenizer, 32, 8)
        assert all(torch.equal(found.batch_at(step)[0], batch) for step, batch in enumerate(batches)), name
        found = TokenStream(find_text(folder / name, "body"), tokenizer, 32, 8, place=Place(document=390))
        assert found.batch_at(0)[0][0].tolist() in TokenStream(
            find_text(folder / "plain.jsonl", "body"), tokenizer, 32, 8, place=Place(document=390)
        ).batch_at(0)[0].tolist()
    with pytest.raises(DataError) as raised:
        TokenStream(find_text(folder / "rows.parquet"), tokenizer, 32, 8).check()
    assert str(raised.value) == (
        f"{folder / 'rows.parquet'} has the columns 'id', 'body': it needs the document as \"text\" or \"content\", or --text-column NAME"
    )
    (folder / "bad.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as parquet: "):
        TokenStream(find_text(folder / "bad.parquet"), tokenizer, 32, 8).check()


def test_a_table_without_datasets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    (folder / "some.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"datasets, 5.0 or newer: pip install 'interlace\[data\]', or convert it to \.jsonl"):
        stream(folder, source=folder / "some.parquet").check()


def test_too_little_text(folder: Path) -> None:
    (folder / "little.txt").write_text("a few words")
    with pytest.raises(DataError, match=r"the text has .* tokens, too few for one sequence of 32: give a longer text or a smaller --seq"):
        stream(folder, source=folder / "little.txt").batch_at(0)
    write_lines(folder / "empty.jsonl", [""] * 50)
    with pytest.raises(DataError, match="the text has 0 tokens, too few"):
        stream(folder, source=folder / "empty.jsonl", pack=False).batch_at(0)


# ---- the command ----


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    return commands.run("train", *arguments, cwd=folder, env=environment)


def facts_of(folder: Path, *arguments: str) -> dict[str, Any]:
    done = train(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


TEXT = ["--text", "corpus", "--stream", "--tokenizer", "tokenizer", "--shuffle-buffer", "20"]


def test_training_on_a_stream(folder: Path) -> None:
    run = [*TINY, *TEXT, "--eval-share", "0.1", "--eval-every", "3"]
    whole = facts_of(folder, *run, "--ranks", "2", "--save", "whole")
    assert whole["last_loss"] < whole["first_loss"] and list(whole["eval_losses"]) == ["3", "6"]
    assert whole["text_read"].endswith("of 3") and whole["text_tokens"] is None
    first = facts_of(folder, *run, "--ranks", "2", "--stop-at", "4", "--save", "part")
    shutil.copytree(folder / "part", folder / "one")
    one = facts_of(folder, "--resume", "one", "--ranks", "1", "--json", "--schedule", "none")
    assert one["losses"] == pytest.approx(whole["losses"][4:], rel=1e-9), "another number of ranks goes on at the same place"
    second = facts_of(folder, "--resume", "part", "--json", "--schedule", "none")
    assert first["losses"] + second["losses"] == whole["losses"]
    assert first["eval_losses"]["3"] == whole["eval_losses"]["3"] and second["eval_losses"]["6"] == whole["eval_losses"]["6"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (folder / "part" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    (folder / "corpus" / "d.txt").write_text("more")
    try:
        done = train(folder, "--resume", "whole", "--steps", "9")
    finally:
        (folder / "corpus" / "d.txt").unlink()
    assert done.returncode == 1 and "the text has changed since whole was saved" in done.stderr


def test_rows_of_one_document_weigh_by_their_tokens(folder: Path) -> None:
    """The loss is the mean over the tokens of the whole batch, however its rows lie on ranks and micro-batches; as PyTorch has it."""
    run = [*TINY, *TEXT, "--no-pack", "--steps", "3"]
    two = facts_of(folder, *run, "--ranks", "2", "--accumulation", "2")
    one = facts_of(folder, *run, "--ranks", "1", "--save", "alone")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "alone", dtype=torch.float64)
    place = Place(*json.loads((folder / "alone" / "run.json").read_text())["stream"])
    inputs, labels, weights = stream(folder, pack=False, shuffle=20, place=place).batch_at(0)
    more = facts_of(folder, "--resume", "alone", "--steps", "4", "--json", "--schedule", "none")
    with torch.no_grad():
        logits = model(input_ids=inputs).logits[weights > 0]
    assert more["losses"][0] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels[weights > 0]).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "bodies.jsonl", "--stream"], "bodies.jsonl, line 1 has 'id', 'body': it needs the document as \"text\" or \"content\""),
        (["--text", "none.txt", "--stream"], "none.txt is empty: give a file with text in it"),
        (["--text", "corpus", "--no-pack"], "--no-pack needs --stream"),
        (["--weights", "nowhere"], "--weights nowhere: there is no such file or folder"),
        (["--passes", "nope"], "passes: unknown pass 'nope'"),
        (["--schedule", "0: nope"], "schedule, step 0, 'nope': unknown pass 'nope'"),
        (["--eval-share", "1.5"], "--eval-share must be between 0 and 1, not 1.5"),
        (["--eval-share", "0.1", "--eval-text", "corpus"], "--eval-share contradicts --eval-text"),
        (["--text", "corpus", "--stream", "--eval-share", "1e-9"], "1e-09: the documents that are held out have 0 tokens, too few"),
    ],
)
def test_what_is_wrong_is_said_before_ranks_start(folder: Path, arguments: list[str], said: str) -> None:
    write_lines(folder / "bodies.jsonl", DOCUMENTS[:5], "body")
    (folder / "none.txt").write_text("")
    done = train(folder, *TINY, *arguments)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and said in done.stderr, done.stderr


def test_a_line_that_is_wrong_ends_the_run_with_its_number(folder: Path) -> None:
    file = write_lines(folder / "late.jsonl", DOCUMENTS[:60])
    file.write_text(file.read_text() + "nothing\n")
    done = train(folder, *TINY, "--text", "late.jsonl", "--stream", "--shuffle-buffer", "8", "--steps", "1000", "--ranks", "2")
    assert done.returncode == 1 and "late.jsonl, line 61: not JSON" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_one_that_is_dropped_takes_no_lock(folder: Path) -> None:
    """The garbage collector drops them where it likes: once in a thread that had just begun, and held what the end of a thread asks for."""
    found = stream(folder, shuffle=4)
    found.batch_at(0)
    with contextlib.ExitStack() as held:
        for lock in filter(None, (getattr(threading, "_shutdown_locks_lock", None), concurrent.futures.thread._global_shutdown_lock)):
            held.enter_context(lock)
        dropping = threading.Thread(target=found._rows.close, daemon=True)
        dropping.start()
        dropping.join(30)
        assert not dropping.is_alive()
