"""A disk that loses power: what was not synced is lost, cut short, or there in part, at any moment of any save.

    python tests/python/simulated_disk.py --points 10000

Saves go to a real folder through a Disk that also writes down what it does. Of these records every prefix is a moment at which power may
fail; what is then on the disk is chosen at random from what the rules of checkpoint/disk.py allow:

    a file       what was synced, or any beginning of what was written after that
    a folder     the names at its last sync, and any number of the changes after that, in their order; each folder for itself
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from interlace.checkpoint.contents import MODEL, OPTIMIZER, PROGRAM, TRAINER, Checkpoint
from interlace.checkpoint.disk import Disk
from interlace.checkpoint.folder import Staging, kept_checkpoints
from interlace.checkpoint.tensor_file import CheckpointError, Layout, sums_of

Event = tuple[Any, ...]
NAME = "c"


class RecordingDisk(Disk):
    """The real disk, and a list of what was done to it. `swaps`: whether names can be exchanged at one blow."""

    def __init__(self, swaps: bool) -> None:
        self.events: list[Event] = []
        self.swaps = swaps

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.events.append(("folder", path))

    def write(self, path: Path, content: bytes) -> None:
        super().write(path, content)
        self.events += [("file", path), ("bytes", path, content), ("sync", path)]

    def create(self, path: Path, head: bytes, size: int) -> None:
        super().create(path, head, size)
        self.events += [("file", path), ("bytes", path, head + bytes(size - len(head)))]

    def fill(self, path: Path, content: bytes) -> None:
        """What the ranks do."""
        path.write_bytes(content)
        self.events += [("bytes", path, content), ("sync", path)]

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.events.append(("sync", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.events.append(("rename", source, target))

    def remove_tree(self, path: Path) -> None:
        if path.exists():
            for file in sorted(path.iterdir()):
                file.unlink()
                self.events.append(("remove", file))
            path.rmdir()
            self.events.append(("remove", path))

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.events.append(("link", source, target))

    def exchange(self, a: Path, b: Path) -> bool:
        if self.swaps and super().exchange(a, b):
            self.events.append(("exchange", a, b))
            return True
        return False


class File:
    def __init__(self) -> None:
        self.lasting, self.now = b"", b""

    def after_crash(self, choice: random.Random) -> bytes:
        if self.lasting == self.now or choice.random() < 0.3:
            return self.lasting
        return self.now[: choice.randint(0, len(self.now))] if choice.random() < 0.7 else self.now


class Folder:
    """`changes`: since the last sync, functions on the names."""

    def __init__(self) -> None:
        self.lasting: dict[str, Any] = {}
        self.now: dict[str, Any] = {}
        self.changes: list[Callable[[dict[str, Any]], None]] = []

    def change(self, what: Callable[[dict[str, Any]], None]) -> None:
        what(self.now)
        self.changes.append(what)

    def sync(self) -> None:
        self.lasting, self.changes = dict(self.now), []

    def after_crash(self, choice: random.Random) -> dict[str, Any]:
        names = dict(self.lasting)
        for change in self.changes[: choice.randint(0, len(self.changes))]:
            change(names)
        return {name: node.after_crash(choice) for name, node in names.items()}


class Replay:
    """The records, up to a moment."""

    def __init__(self, root: Path) -> None:
        self._root, self._top = root, Folder()

    def _folder(self, path: Path) -> Folder:
        node = self._top
        for part in path.relative_to(self._root).parts:
            node = node.now[part]
        return node

    def apply(self, event: Event) -> None:
        kind, path = event[0], event[1]
        name, parent = path.name, self._folder(path.parent) if path != self._root else self._top
        if kind in ("folder", "file"):
            node = Folder() if kind == "folder" else File()
            parent.change(lambda names: names.__setitem__(name, node))
        elif kind == "bytes":
            parent.now[name].now = event[2]
        elif kind == "sync":
            node = self._top if path == self._root else parent.now[name]
            if isinstance(node, Folder):
                node.sync()
            else:
                node.lasting = node.now
        elif kind == "remove":
            parent.change(lambda names: names.pop(name, None))
        else:
            other, to = event[2].name, self._folder(event[2].parent)
            node = parent.now[name]
            if kind == "link":
                to.change(lambda names: names.__setitem__(other, node))
            elif kind == "rename":
                parent.change(lambda names: (names.pop(name, None), names.__setitem__(other, node)))
            else:
                target = parent.now[other]
                parent.change(lambda names: names.update({name: target, other: node}))

    def after_crash(self, choice: random.Random) -> dict[str, Any]:
        return self._top.after_crash(choice)


def save(disk: RecordingDisk, final: Path, step: int, keep: int) -> None:
    """A small checkpoint, by the same steps as a trainer's."""
    tensors = {"w": torch.full((6, 5), float(step)), "b": torch.arange(3.0) + step}
    declared = [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
    files = {MODEL: Layout(declared, {"format": "pt"}), OPTIMIZER: Layout([], {"format": "pt"})}
    staging = Staging(final, files, {"note.txt": f"of step {step}"}, disk)
    sums = []
    for number, (name, layout) in enumerate(files.items()):
        content = bytearray(layout.head + bytes(layout.bytes - len(layout.head)))
        for key, entry in layout.entries.items():
            data = save_tensors({key: tensors[key]})[-entry.bytes :]
            content[entry.offset : entry.offset + entry.bytes] = data
        disk.fill(staging.folder / name, bytes(content))
        begin = len(layout.head)
        if layout.entries:
            sums.append((number, begin, layout.bytes - begin, sums_of(bytes(content[begin:]))[0][2]))
    staging.add(PROGRAM, "program of nothing\n")
    staging.add(TRAINER, f'{{"format": 2, "step": {step}, "kind": [], "groups": []}}')
    staging.cover(sums)
    staging.commit(keep)


def newest(folder: Path, swaps: bool) -> int | None:
    """The step that --resume would find: of the folder itself, where names can be exchanged; else also of an older name."""
    final = folder / NAME
    for place in [final] if swaps else [final, *kept_checkpoints(final)]:
        try:
            with Checkpoint(place) as found:
                found.verify()
                if found.read("note.txt").decode() != f"of step {found.record['step']}":
                    raise AssertionError(f"{place} holds files of two checkpoints")
                return int(found.record["step"])
        except CheckpointError:
            continue
    return None


def lay_out(tree: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, dict):
            lay_out(node, folder / name)
        else:
            (folder / name).write_bytes(node)


def crash_points(points: int, seed: int, keep: int, swaps: bool, saves: int = 5) -> int:
    """Tries so many; gives at how many different moments. Error: a crash after which no checkpoint is as new as it must be."""
    choice = random.Random(seed)
    with tempfile.TemporaryDirectory() as where:
        root = Path(where, "disk")
        root.mkdir()
        disk = RecordingDisk(swaps)
        done: list[int] = []  # by save: how many records there were when it was there
        for step in range(1, saves + 1):
            save(disk, root / NAME, step, keep)
            done.append(len(disk.events))
        moments = set()
        for number in range(points):
            moment = choice.randrange(done[0], len(disk.events) + 1)
            moments.add(moment)
            replay = Replay(root)
            for event in disk.events[:moment]:
                replay.apply(event)
            after = Path(where, f"after-{number}")
            lay_out(replay.after_crash(choice), after)
            found, least = newest(after, swaps), sum(end <= moment for end in done)
            if found is None or found < least:
                raise AssertionError(
                    f"power lost after record {moment} of {len(disk.events)} (seed {seed}, keep {keep}): found step {found}, "
                    f"step {least} was there; the last records: {disk.events[max(0, moment - 4) : moment]}"
                )
            for path in sorted(after.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            after.rmdir()
    return len(moments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for keep in (1, 3):
        for swaps in (True, False):
            moments = crash_points(args.points // 4, args.seed, keep, swaps)
            print(f"keep {keep}, {'exchange' if swaps else 'renames'}: {args.points // 4} power cuts at {moments} moments, always whole")


if __name__ == "__main__":
    main()
