"""Changed files for every reader in Python (mutated_files.py, file_readers.py): a sample, and 100,000."""

from __future__ import annotations

import os
from functools import partial
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


def _careless(fault: str, folder: Path) -> bytes:
    text = (folder / "x").read_bytes()
    if text != WRITTEN and fault == "KeyError":
        raise KeyError("raw")
    if text != WRITTEN and fault == "SIGABRT":
        os.abort()
    return text


WRITTEN = b"some words, and 12 numbers"


@pytest.mark.parametrize("fault", ["KeyError", "SIGABRT", "another value was believed"])
def test_what_a_reader_must_not_do_is_found(fault: str, tmp_path: Path) -> None:
    reader = Reader("careless", lambda folder: (folder / "x").write_bytes(WRITTEN) and None, partial(_careless, fault), checked=True)
    _, findings = mutated_files.run_seeds(reader, range(5), tmp_path)
    assert len(findings) >= 4 and all(fault in wrong for wrong in findings.values())
