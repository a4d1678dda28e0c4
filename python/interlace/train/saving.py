"""A Trainer's checkpoints on their way out: what each rank writes, and the save that goes on beside the steps (saver.py)."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from interlace.capture.groups import is_rule
from interlace.checkpoint.contents import FORMAT, MODEL, OPTIMIZER, TRAINER, program_of
from interlace.checkpoint.folder import Staging, check_place, place_of
from interlace.checkpoint.optimizer import plain_hyper
from interlace.checkpoint.saver import Locks, Piece, Save
from interlace.checkpoint.scheduler import SCHEDULER, scheduler_text
from interlace.checkpoint.tensor_file import CHUNK, CheckpointError, Entry, Layout
from interlace.compiling.states import WEIGHT, Parameter, Unit
from interlace.dist import sealed
from interlace.private import mark
from interlace.train import generators
from interlace.train.laid_by import LaidBy, share
from interlace.train.loop import Loop
from interlace.train.own_steps import own_states
from interlace.train.run import Run

log = logging.getLogger("interlace")
Tensor = torch.Tensor
SHORT_RUN = 64 << 10  # bytes; where parts of a parameter alternate in shorter runs than these, ranks first put rows together


class Saving:
    """The checkpoints of one trainer. `last`: bytes and seconds of the last one that ended."""

    def __init__(self, run: Run, loop: Loop) -> None:
        self._run, self._loop = run, loop
        self.last: dict[str, Any] | None = None
        self._count = 0
        self._begin: dict[str, float] = {}
        self._locks = Locks()
        self._hf_texts: tuple[dict[str, Any], dict[str, str | bytes]] | None = None  # of the configs as they were

    def save(self, folder: str | Path, extra: Mapping[str, str | bytes], wait: bool, keep: int, scheduler: Any) -> None:
        self._run.check_open()
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise CheckpointError(f"keep must be a whole number of at least 1, not {keep!r}")
        if scheduler is not None:
            extra = {**extra, SCHEDULER: scheduler_text(scheduler)}
        extra = {**extra, **own_states(self._run.optimizer)}
        self.finish()
        self._run.all_here("trainer.save")
        self._run.flush()
        begin, cpu = time.monotonic(), time.thread_time()
        with self._run.peers.guard():
            problem = self._begin_save(place_of(folder), extra, keep)
        if problem is not None:
            raise CheckpointError(problem)
        self._begin = {"begin_seconds": time.monotonic() - begin, "begin_cpu_seconds": time.thread_time() - cpu}
        if wait or self._run.config.mode == "eager":
            assert self._run.save is not None
            self._run.save.wait_staged()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Waits for the save under way, if there is one."""
        if self._run.save is None:
            return
        save, self._run.save = self._run.save, None
        with self._run.peers.guard():
            problem = save.finish()
            self.last = {**self._begin, **save.stats()}
        if problem is not None:
            raise CheckpointError(problem)

    def reserve(self, folder: str | Path) -> None:
        self._run.check_open()
        final = place_of(folder)

        def check() -> Callable[[], None]:
            if self._run.rank == 0:
                check_place(final)
                self._locks.take(final)
            return lambda: None

        self._run.agree(f"folder {self.next()}", check)()

    def next(self) -> int:
        """A number that no save or load had: a key of the store is written once."""
        self._count += 1
        return self._count

    def drop(self) -> None:
        """The trainer ends: what is being written is given up, the old checkpoint stays."""
        if self._run.save is not None:
            self._run.save.cancel()
            self._run.save = None
        self._locks.release()

    def _begin_save(self, final: Path, extra: Mapping[str, str | bytes], keep: int) -> str | None:
        """Starts it on every rank; or says what is wrong with the place."""
        name = f"save {self.next()} at step {self._run.steps}"
        roles, rng = self._run.roles(), self._rng_states()
        self._run.share_buffers()
        model_list, optimizer_list = self._file_lists(roles, rng)
        files = {MODEL: Layout(model_list, {"format": "pt"}), OPTIMIZER: Layout(optimizer_list, {"format": "pt"})}
        staging: Staging | None = None
        word: dict[str, Any] = {}
        if self._run.rank == 0:
            try:
                check_place(final)
                self._locks.take(final)
                staging = Staging(final, files, {**self._hf_files(), **extra})
                for stage, text in enumerate(self._run.source.texts):
                    staging.add(program_of(stage), text)
                staging.add(TRAINER, json.dumps(self._record(), indent=1) + "\n")
                word = {"folder": str(staging.folder)}
            except CheckpointError as e:
                word = {"problem": str(e)}
                if staging is not None:
                    staging.discard()
        word = json.loads(self._run.peers.broadcast(name, json.dumps(word).encode()))
        if "problem" in word:
            return word["problem"]
        paths = [Path(word["folder"]) / file for file in files]
        self._run.save = Save(self._run.peers, name, final, paths, self._staging_bytes(), staging, keep)
        try:
            self._give_pieces(self._run.save, files, roles, rng)
        except BaseException:  # a tier that gives other bytes: nobody must wait for the rest of the pieces
            self._run.save.cancel()
            self._run.save = None
            raise
        return None

    def _staging_bytes(self) -> int:
        """How much a save may hold in copies: what the limit leaves beside a step's peak and the writer's own 2 MiB."""
        limit = self._run.config.memory_limit_bytes
        if limit is None:
            return 2**62
        return max(limit - self._run.executor.stats()["peak_bytes"] - 2 * CHUNK, CHUNK)

    def _give_pieces(self, save: Save, files: dict[str, Layout], roles: list[str], rng: list[Tensor]) -> None:
        """What this rank writes: its shards, and of what all ranks have its share; the small rest is rank 0's.

        States that are out of memory at times come in one by one, and go back when they are copied. So they come first: what stays
        where it is may be copied later, beside the next step.
        """
        for unit in self._run.states.units:
            for p in unit.parameters:  # groups that all ranks make
                if p.cuts.axes:
                    self._run.peers.groups.along(self._run.mesh, p.cuts.word)
        units = [(role, unit) for role in (WEIGHT, *roles) for unit in self._run.states.units if self._run.states.has(unit, role)]
        for role, unit in units:
            if self._run.states.moves(unit, role):
                save.add(self._unit_pieces(unit, role, files))
                save.wait_staged()
                self._run.states.put_back(unit, role)
        pieces = [p for role, unit in units if not self._run.states.moves(unit, role) for p in self._unit_pieces(unit, role, files)]
        pieces += self._loose_pieces(files[MODEL].entries) + self._laid_pieces(files[OPTIMIZER].entries)
        if self._run.rank == 0:
            pieces += self._small_pieces(files[MODEL].entries, files[OPTIMIZER].entries, rng)
        save.add(sorted(pieces, key=lambda p: p[3:]))  # by file and place: what follows on each other is one write
        save.close()

    def _unit_pieces(self, unit: Unit, role: str, files: dict[str, Layout]) -> list[Piece]:
        here, origin = self._run.states.local(unit, role)
        low, high = self._run.states.written(unit, role)
        t, base, here = here.detach(), origin, here.detach()
        if t.device.type != "cpu":
            t, base = t[low - base : high - base].cpu(), low
        pieces: list[Piece] = []
        for p in unit.parameters:
            begin, end = max(low, p.offset), min(high, p.offset + p.numel)
            if role == WEIGHT:
                entries = [files[MODEL].entries[place] for place in self._run.tensors.places(p.name)]
            else:
                entries = [files[OPTIMIZER].entries[f"{role}.{p.name}"]] if self._run.has_state(p) else []
            if begin < end and entries:
                number, mine = 0 if role == WEIGHT else 1, here[begin - origin : end - origin]
                for part, first, last, place in self._stretches(p, mine, t[begin - base : end - base], begin - p.offset):
                    pieces += [_piece(part, first, last, number, entry, place) for entry in entries]
        return pieces

    def _stretches(self, p: Parameter, mine: Tensor, host: Tensor, first: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """What this rank writes of a parameter, elements [first, ...) of its part of which it has as `mine` on the device and as `host`:
        (tensor, begin, end, first element in the whole).

        Ranks whose parts alternate in short runs exchange them, so that each writes rows of the whole that follow on each other.
        """
        end, cuts = first + mine.numel(), p.cuts
        low = high = end  # of the elements that are exchanged
        if len(cuts.steps) == 1 and cuts.run * mine.element_size() < SHORT_RUN:
            low, high = -(-first // cuts.run) * cuts.run, end // cuts.run * cuts.run
        if low < high:
            rows, row = self._rows(p, mine[low - first : high - first])
            yield rows, 0, rows.numel(), (low // cuts.run + row) * cuts.run * cuts.steps[0].ranks
        else:
            low = high = end
        for begin, stop, place in (*cuts.runs(first, low), *cuts.runs(high, end)):
            yield host, begin - first, stop - first, place

    def _rows(self, p: Parameter, runs: Tensor) -> tuple[Tensor, int]:
        """Of whole runs of a part, as every rank along the cut has as many: this rank's share of the rows that they make, and the number of
        its first row."""
        step = p.cuts.steps[0]
        count, width = runs.numel() // step.run, step.run * runs.element_size()
        borders = [count * i // step.ranks for i in range(step.ranks + 1)]
        low, high = borders[step.index : step.index + 2]
        found = torch.empty(step.ranks * (high - low) * width, dtype=torch.uint8, device=runs.device)
        sealed.exchange(
            found, runs.contiguous().view(torch.uint8), [(b - a) * width for a, b in pairwise(borders)],
            [(high - low) * width] * step.ranks, self._run.peers.groups.along(self._run.mesh, p.cuts.word),
        )  # fmt: skip
        rows = found.view(step.ranks, high - low, width).transpose(0, 1).contiguous().view(-1).view(runs.dtype)
        return rows.cpu(), low

    def _loose_pieces(self, model: dict[str, Entry]) -> list[Piece]:
        pieces: list[Piece] = []
        for p in self._run.states.loose:
            whole = next(self._run.states.parts(p, WEIGHT))[0].detach().cpu().contiguous()
            low, high = share(self._run, p.numel)
            pieces += [_piece(whole, low, high, 0, model[place], low) for place in self._run.tensors.places(p.name)]
        return pieces

    def _laid_pieces(self, optimizer: dict[str, Entry]) -> list[Piece]:
        pieces: list[Piece] = []
        for role, name, laid in self._laid():
            entry, part = optimizer[f"{role}.{name}"], laid.parts[role].cpu()
            low, high = share(self._run, torch.Size(laid.shapes[role]).numel())
            pieces += [_piece(part, 0, high - low, 1, entry, low)] if low < high else []
        return pieces

    def _laid(self) -> Iterator[tuple[str, str, LaidBy]]:
        """Role by role what is laid by of parameters that the program does not train."""
        run = self._run
        trained = {p.name for p in run.states.everything if p.roles}
        return ((role, n, laid) for n, laid in sorted(run.laid_by.items()) if n not in trained for role in laid.parts)

    def _small_pieces(self, model: dict[str, Entry], optimizer: dict[str, Entry], rng: list[Tensor]) -> list[Piece]:
        pieces: list[Piece] = []
        for name, canonical, is_parameter in self._run.tensors.entries:
            if not is_parameter:  # a forward changes buffers, so they are copied now
                copy = self._run.tensors.buffers[canonical].detach().to("cpu", copy=True).contiguous().view(-1)
                pieces.append(_piece(copy, 0, copy.numel(), 0, model[name], 0))
        pieces += [_piece(state, 0, state.numel(), 1, optimizer[f"rng.{r}"], 0) for r, state in enumerate(rng)]
        return pieces

    def _file_lists(self, roles: list[str], rng: list[Tensor]) -> tuple[list[Any], list[Any]]:
        """(name, dtype, shape) of both files, in the order in which tensors are gathered."""
        states = self._run.states
        model = [(name, p.dtype, p.shape) for p in states.everything for name in self._run.tensors.places(p.name)]
        buffers = self._run.tensors.buffers
        model += [(e, buffers[n].dtype, tuple(buffers[n].shape)) for e, n, is_parameter in self._run.tensors.entries if not is_parameter]
        kept = [(role, p) for role in roles for p in states.everything if role in p.roles and self._run.has_state(p)]
        optimizer = [(f"{role}.{p.name}", p.roles[role], p.shape_of(role)) for role, p in kept]
        optimizer += [(f"{role}.{name}", laid.parts[role].dtype, laid.shapes[role]) for role, name, laid in self._laid()]
        optimizer += [(f"rng.{r}", t.dtype, tuple(t.shape)) for r, t in enumerate(rng)]
        return model, optimizer

    def _rng_states(self) -> list[Tensor]:
        """Every rank's default generator; needed in compat mode only, because keyed streams have no state."""
        if self._run.config.rng != "compat":
            return []
        mine = generators.state(self._run.peers.device).numpy().tobytes().hex()
        texts = self._run.peers.exchange(f"generators at step {self._run.steps}", mine)
        return [torch.frombuffer(bytearray.fromhex(t), dtype=torch.uint8) for t in texts]

    def _hf_files(self) -> dict[str, str | bytes]:
        """config.json (and generation_config.json) of a Hugging Face model."""
        config: Any = getattr(self._run.model, "config", None)
        if not (hasattr(config, "to_json_string") and hasattr(config, "architectures")):
            return {}
        config = copy.copy(config)  # the user's own stays as it is on all ranks
        config.architectures = [type(self._run.model).__name__]
        configs = {"config.json": config, "generation_config.json": getattr(self._run.model, "generation_config", None)}
        present = {name: c for name, c in configs.items() if hasattr(c, "to_json_string")}
        content = {name: c.to_dict() for name, c in present.items()}
        if self._hf_texts is None or self._hf_texts[0] != content:  # making the texts takes a fifth of a save's call
            self._hf_texts = content, {name: c.to_json_string(use_diff=True) for name, c in present.items()}
        return dict(self._hf_texts[1])

    def _record(self) -> dict[str, Any]:
        groups = []
        kinds = [self._run.kind_of(i) for i in range(len(self._run.optimizer.param_groups))]
        for i, group in enumerate(self._run.optimizer.param_groups):
            names = self._run.names_of_group(i)
            if i >= len(self._run.hyper.steps):  # added since the last step
                more: dict[str, Any] = {"states": [], "scalars": {}} if is_rule(kinds[i]) else {}
                groups.append({"steps": 0, "hyper": plain_hyper(group), "parameters": names, **more})
                continue
            steps = self._run.hyper.steps[i]
            record = {"steps": steps, "hyper": plain_hyper(group), "parameters": names}
            laid = (role for name in names if name in self._run.laid_by for role in self._run.laid_by[name].parts)
            rule = {"states": list(dict.fromkeys([*self._run.state_names(i), *laid])), "scalars": self._run.hyper.scalars(i)}
            groups.append({**record, **(rule if is_rule(kinds[i]) else {})})
        group_of = {name: i for i in range(len(kinds)) for name in self._run.names_of_group(i)}
        laid_by = {n: [laid.made, self._run.hyper.scalars(group_of[n], laid)] for n, laid in sorted(self._run.laid_by.items())}
        return {
            "format": FORMAT, "step": self._run.steps, "kind": kinds,
            "groups": groups, "seed": self._run.config.seed, "rng": self._run.config.rng, "world_size": self._run.world_size,
            "left_out": self._run.left_out, "laid_by": laid_by,
            "loss_scale": self._run.loss_scale.state(), "loop": self._loop.state(), "run": self.digest(),
            "made_here": mark("".join(self._run.source.texts)), "regions": self._run.regions, "kernels": self._run.programs.kernels,
        }  # fmt: skip

    def digest(self) -> str:
        """What decides the program: the captured text, the settings of compiling, the number of ranks. Rank 0 knows it."""
        from interlace import _core

        config, ranks = self._run.config, self._run.world_size
        parts = [self._run.source.captured, config.pipeline(ranks), repr(config.schedule), str(config.memory_limit)]
        return _core.digest("\n".join([*parts, str(config.cluster), str(ranks)]))


def _piece(t: Tensor, begin: int, end: int, file: int, entry: Entry, first: int) -> Piece:
    """Elements [begin, end) of a flat tensor, which are the entry's elements from `first` on."""
    return t, begin, end, file, entry.offset + first * t.element_size()
