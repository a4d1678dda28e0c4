"""Where the values are that Python may write between two steps, and how they come to the program.

    the model's parameters and buffers                      views of the program's storages (materialize.py); `p.data = t` is taken over
    those of modules beside it (a teacher, a target)        the program's storages, too; what shares memory (another trainer's) is copied
    tensors that the program changes (recurrent states)     views of the program's storages are put into their places
    other tensors that the model or loss function reads     copied into buffers, when a run begins, when written or replaced
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interlace.capture.model_tensors import ModelTensor, collect
from interlace.capture.watch import Watch, describe
from interlace.dist.peers import PeerError, first_difference
from interlace.errors import InterlaceError
from interlace.train.materialize import checksum, point_at
from interlace.train.run import Run

Tensor = torch.Tensor


class Values:
    """Of one trainer. `written`: ids of tensors that Python wrote since the last step, where that has the model captured again."""

    def __init__(self, run: Run, model: nn.Module, watch: Watch) -> None:
        self.run, self._model, self._watch = run, model, watch
        self.written: set[int] = set()
        self._memory: tuple[Any, list[tuple[ModelTensor, int]]] = None, []  # a program, and where the tensors are
        self._reals: list[Tensor] = []  # these tensors,
        self._marks = b""  # and theirs
        self._buffers: dict[str, Tensor] = {}  # the program's, for parameters and buffers of other modules
        self._lent: dict[int, Tensor] = {}  # these parameters and buffers, where their memory is the program's
        self._before: dict[str, Tensor] = {}  # when it was looked the time before
        self._seen: dict[str, Tensor] = {}  # and last
        self._views: dict[str, Tensor] = {}  # of buffers that the program changes, in the places of the tensors

    @property
    def shown(self) -> set[int]:
        """Ids of tensors that are the program's."""
        return {id(view) for view in self._views.values()}

    def views(self) -> dict[str, Tensor]:
        """Of the buffers that the program changes and that are none of the model's own."""
        own = {t.name for t in collect(self._model) if t.kind == "buffer"}
        for b in self.run.ir.buffers():
            if b["changed"] and b["name"] not in self._views and b["name"] not in own:
                self._views[b["name"]] = self.run.executor.tensor(b["value"]).detach()
        return self._views

    def begin(self) -> None:
        """A program comes with rank 0's tensors. As in eager steps each rank has its own."""
        run, self._seen = self.run, self._tensors(self._watch)
        if run.mesh.size(run.mesh.shared) > 1 or run.config.stage_meshes:
            names = {b["name"] for b in run.ir.buffers()}
            mine = {name: checksum(t).hex() for name, t in (self._seen | self._watch.outside).items() if name in names}
            everyone = run.peers.exchange("tensors beside the model", mine)
            groups = run.mesh.groups(run.mesh.shared) if not run.config.stage_meshes else [range(run.peers.size)]
            for group in groups:
                if (found := first_difference([everyone[rank] for rank in group])) is not None:
                    raise PeerError(
                        f"{found[1]} holds something else on rank {group[found[0][0]]} than on rank {group[0]}, and they work on one batch; "
                        "give these ranks the same", group[found[0][0]],
                    )  # fmt: skip
        self.fill()

    def look(self, watch: Watch) -> None:
        """Something has changed."""
        self._watch, self._memory = watch, (None, [])
        self._before, self._seen = self._seen, self._tensors(watch)

    def fill(self) -> None:
        """Tensors that have no memory of the program's: their values go into its buffers, but for those that it has changed since."""
        buffers = {b["name"]: b for b in self.run.ir.buffers()}
        for name, t in self._tensors(self._watch).items():
            if name in buffers and (not buffers[name]["changed"] or self._before.get(name) is not t or id(t) in self.written):
                storage = self.run.executor.tensor(buffers[name]["value"])
                storage.copy_(t.detach())
                if name in self._views:  # which shows what an earlier program left
                    self._views[name].data = storage

    def _tensors(self, watch: Watch) -> dict[str, Tensor]:
        """Tensors that have no memory of the program's, by the names of its buffers."""
        own = {t.name: t.real for t in collect(self._model) if t.kind == "plain" and not t.real.is_meta and id(t.real) not in self.shown}
        return watch.tensors() | own

    def take(self) -> None:
        """Parameters and buffers that were given other memory (`p.data = t`): their values go into the program's. Those of modules outside
        of the model have the program's from the first time on."""
        from interlace import _runtime

        run = self.run
        if self._memory[0] is not run.ir:
            found = [(t, self._storage(t)) for t in (*collect(self._model), *self._outside())]
            self._memory = run.ir, [(t, s.data_ptr()) for t, s in found if s is not None and s.device == t.real.device]
            self._reals, self._marks = [t.real for t, _ in self._memory[1]], b""
            for b in run.ir.buffers():
                view, storage = self._views.get(b["name"]), run.executor.tensor(b["value"])
                if view is not None and view.data_ptr() != storage.data_ptr():
                    storage.copy_(view)
                    view.data = storage
        for where, buffer in self._buffers.items():
            if id(self._watch.outside[where]) not in self._lent:
                buffer.copy_(self._watch.outside[where].detach())
        if _runtime.marks(self._reals) == self._marks:
            return
        for i, (t, pointer) in enumerate(self._memory[1]):
            if t.real.data_ptr() == pointer:
                continue
            storage = self._storage(t)
            if storage is None or (storage.shape, storage.dtype) != (t.real.shape, t.real.dtype):
                raise InterlaceError(f"'{t.name}' is {describe(t.real)} of {t.real.dtype} now, and was not when compiled; compile again")
            if t.real.data_ptr() != storage.data_ptr():
                run.flush()
                storage.copy_(t.real.detach())
                point_at(t.real, storage)
            self._memory[1][i] = t, storage.data_ptr()
        self._marks = _runtime.marks(self._reals)

    def _outside(self) -> list[ModelTensor]:
        """The parameters and buffers of other modules that may be the program's buffers themselves. Those that were get memory of their own
        again."""
        outside = self._watch.outside
        self._buffers = {b["name"]: self.run.executor.tensor(b["value"]) for b in self.run.ir.buffers() if b["name"] in outside}
        form = lambda t: (t.device, t.dtype, t.shape, t.stride())  # noqa: E731
        alone = [where for where, s in self._buffers.items() if form(s) == form(outside[where]) and _alone(outside[where])]
        found = [ModelTensor(where, outside[where], "outside") for where in alone]
        now = {id(t.real): t.real for t in found}
        for t in (t for key, t in self._lent.items() if key not in now):
            t.data = t.detach().clone()
        self._lent = now
        return found

    def _storage(self, t: ModelTensor) -> Tensor | None:
        """What the program keeps a tensor of the model in, whole."""
        if t.kind == "param":
            return self.run.states.resident(t.name)
        if t.kind == "outside":
            return self._buffers[t.name]
        return self.run.tensors.buffers.get(t.name) if t.kind == "buffer" else None


def _alone(t: Tensor) -> bool:
    """Whether a tensor has memory of its own, all of which it shows."""
    return type(t) in (Tensor, nn.Parameter) and not t._is_view() and t.untyped_storage().nbytes() == t.nbytes
