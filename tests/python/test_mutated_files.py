"""Changed files for every reader in Python (mutated_files.py, file_readers.py): a sample, and 100,000."""

from __future__ import annotations

from pathlib import Path

import mutated_files
import pytest
from file_readers import READERS, Reader


def check(name: str, seeds: range, folder: Path) -> None:
    said, findings = mutated_files.run_seeds(READERS[name], seeds, folder)
    again = [f"python tests/python/mutated_files.py --reader {name} --seed {seed}  # {wrong}" for seed, wrong in findings.items()]
    assert not findings, "\n".join(again)
    assert sum(said.values()) == len(seeds)
    assert said["the same"] < len(seeds) / 2


@pytest.mark.parametrize("name", sorted(READERS))
def test_sample(name: str, tmp_path: Path) -> None:
    check(name, range(60), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(READERS))
def test_many(name: str, tmp_path: Path) -> None:
    check(name, range(100, 100 + 100_000 // len(READERS) + 1), tmp_path)


def _careless(folder: Path) -> object:
    text = (folder / "x").read_bytes()
    if b"\xff" in text:
        raise KeyError("raw")
    if len(text) < 2:
        import os

        os.abort()
    return text


def test_what_a_reader_must_not_do_is_found(tmp_path: Path) -> None:
    """Another exception, a signal, a value that nobody wrote."""
    reader = Reader("careless", lambda folder: (folder / "x").write_bytes(b"0123456789") and None, _careless, checked=True)
    _, findings = mutated_files.run_seeds(reader, range(600), tmp_path)
    words = " ".join(findings.values())
    assert "KeyError" in words and "SIGABRT" in words and "another value was believed" in words
