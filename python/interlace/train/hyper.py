"""The torch.optim object as the source of hyper-parameters: read anew each step, so torch's schedulers work as they are.

The program's update takes one list of doubles per parameter group (docs/architecture.md); the step count t is kept here, per
group, because a group may be new or be imported from an optimizer that already made steps.
"""

from __future__ import annotations

import torch

from interlace.checkpoint.optimizer import kind_of
from interlace.errors import InterlaceError


def uses_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of an SGD needs a momentum buffer; true for the others."""
    return not isinstance(optimizer, torch.optim.SGD) or any(g["momentum"] != 0 for g in optimizer.param_groups)


class Hyper:
    """Step counts and hyper-parameters of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = [0] * len(optimizer.param_groups)
        self._momentum = uses_momentum(optimizer)
        self._groups = len(optimizer.param_groups)

    def values(self) -> list[list[float]]:
        """One list per group for the step about to run; t counts from 1. Error: groups were added, or a value cannot be run."""
        if len(self.optimizer.param_groups) != self._groups:
            raise InterlaceError(
                f"the optimizer had {self._groups} parameter groups when compiled and has {len(self.optimizer.param_groups)} now; "
                "compile again after add_param_group"
            )
        out = []
        for i, group in enumerate(self.optimizer.param_groups):
            t = float(self.steps[i] + 1)
            if kind_of(self.optimizer, group) == "sgd":
                momentum = float(group["momentum"])
                if momentum != 0 and not self._momentum:
                    raise InterlaceError(
                        f"optimizer group {i} has momentum {momentum} now, but 0 when compiled; compile again with a momentum"
                    )
                row = [float(group[k]) for k in ("lr", "momentum", "dampening", "weight_decay")]
                row += [float(group["nesterov"]), t, float(group["maximize"])]
            else:
                beta1, beta2 = group["betas"]
                row = [float(x) for x in (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], t, group["maximize"])]
            out.append(row)
        return out

    def advance(self) -> None:
        """An update was made."""
        self.steps = [t + 1 for t in self.steps]

    def before_step(self) -> None:
        """What torch does on entry of optimizer.step()."""
        for hook in list(getattr(self.optimizer, "_optimizer_step_pre_hooks", {}).values()):
            hook(self.optimizer, (), {})

    def after_step(self) -> None:
        """What torch does on leaving optimizer.step(), and the mark that keeps schedulers from warning about their order."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for hook in list(getattr(self.optimizer, "_optimizer_step_post_hooks", {}).values()):
            hook(self.optimizer, (), {})

    def import_steps(self) -> bool:
        """Takes over the step counts of an optimizer that has already trained; whether there were any.

        Error: parameters of one group that have made different numbers of steps.
        """
        found = False
        for i, group in enumerate(self.optimizer.param_groups):
            counts: dict[int, int] = {}
            for j, p in enumerate(group["params"]):
                state = self.optimizer.state.get(p)
                if not state:
                    continue
                if "step" in state:
                    counts.setdefault(int(state["step"]), j)
                elif state.get("momentum_buffer") is not None:
                    counts.setdefault(1, j)  # SGD keeps no count; all that matters is that the first step is past
            if len(counts) > 1:
                listing = ", ".join(f"number {j} made {t}" for t, j in counts.items())
                raise InterlaceError(
                    f"parameters of optimizer group {i} have made different numbers of steps ({listing}); put them in groups of "
                    "their own, or start with a fresh optimizer"
                )
            if counts:
                self.steps[i] = next(iter(counts))
                found = True
        return found
