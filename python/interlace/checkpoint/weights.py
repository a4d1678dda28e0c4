"""Weights on their way in: one safetensors file, a sharded index, or a Hugging Face folder with either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from interlace.checkpoint.tensor_file import CheckedTensors
from interlace.errors import UNREADABLE, InterlaceError

Tensor = torch.Tensor


class Weights:
    """The tensors of one safetensors file, or of a Hugging Face folder with model.safetensors or a sharded index."""

    def __init__(self, source: str | Path) -> None:
        self.source = Path(source)
        self._files: dict[Path, Any] = {}
        self._of: dict[str, Path] = {}
        path = self.source
        if path.is_dir():
            names = ("model.safetensors", "model.safetensors.index.json")
            found = [path / n for n in names if (path / n).is_file()]
            if not found:
                raise InterlaceError(f"folder {path} has neither {names[0]} nor {names[1]}")
            path = found[0]
        if not path.is_file():
            raise InterlaceError(f"no such file: {path}")
        if path.suffix == ".json":
            try:
                index = json.loads(path.read_text())["weight_map"]
                self._of = {str(name): path.parent / str(file) for name, file in index.items()}
            except UNREADABLE as e:
                raise InterlaceError(f'{path} is no index of safetensors files (no "weight_map"): {e}') from e
            for name, file in self._of.items():
                if file.name != index[name] or file.suffix != ".safetensors":
                    raise InterlaceError(
                        f"{path} places '{name[:80]}' in '{str(index[name])[:80]}'; an index names .safetensors files of its own folder only"
                    )
        else:
            self._of = dict.fromkeys(self._open(path).keys(), path)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt", device="cpu").__enter__()
            except (SafetensorError, OSError) as e:
                raise InterlaceError(f"{path} cannot be read as a safetensors file (cut off or edited?): {e}") from e
        return self._files[path]

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def names(self) -> list[str]:
        return list(self._of)

    def shape(self, name: str) -> list[int]:
        return list(self._slice(name).get_shape())

    def _slice(self, name: str) -> Any:
        try:
            return self._open(self._of[name]).get_slice(name)
        except SafetensorError as e:
            raise InterlaceError(f"{self._of[name]} does not hold '{name}', though the index says so: {e}") from e

    def read(self, name: str) -> Tensor:
        return self._open(self._of[name]).get_tensor(name)

    def read_range(self, name: str, start: int, end: int) -> Tensor:
        """Elements [start, end) of the tensor in row-major order; reads only the rows they touch."""
        piece = self._slice(name)
        shape = piece.get_shape()
        if not shape or start >= end:
            return self.read(name).reshape(-1)[start:end]
        row = 1
        for n in shape[1:]:
            row *= n
        first, last = start // row, -(-end // row)
        return piece[first:last].reshape(-1)[start - first * row : end - first * row]

    def close(self) -> None:
        for f in self._files.values():
            f.__exit__(None, None, None)
        self._files.clear()


class HeldWeights:
    """The tensors of a state dict, read like those of a file. Error: what is no tensor, or has no values."""

    source = "the state dict"

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        for name, t in values.items():
            if not isinstance(t, Tensor) or t.is_meta:
                what = "on the meta device" if isinstance(t, Tensor) else f"a {type(t).__name__}"
                raise InterlaceError(f"'{name}' of the state dict is {what}; pass real tensors by name, as model.state_dict() has them")
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def shape(self, name: str) -> list[int]:
        return list(self._values[name].shape)

    def read(self, name: str) -> Tensor:
        return self._values[name].detach()

    def read_range(self, name: str, start: int, end: int) -> Tensor:
        return self.read(name).reshape(-1)[start:end]

    def close(self) -> None:
        pass


def find_name(weights: Weights | HeldWeights | CheckedTensors, names: list[str], prefix: str | None) -> str | None:
    """The file's name for a tensor that the model knows by `names`: as it is, or without the model's base prefix ("transformer.")."""
    for name in names:
        if name in weights:
            return name
        if prefix and name.startswith(prefix + ".") and name[len(prefix) + 1 :] in weights:
            return name[len(prefix) + 1 :]
    return None
