"""torch's default generators: of the host, and of the device on which a program or a user's own loop draws. Keyed streams have no state and
need none of this."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch
from torch import Tensor

log = logging.getLogger("interlace")


def state(device: torch.device) -> Tensor:
    """uint8 [n]: what the generator of this device will draw."""
    if device.type == "cpu":
        return torch.get_rng_state()
    taken: Tensor = torch.get_device_module(device).get_rng_state(device)
    return taken.cpu()


def restore(device: torch.device, saved: Tensor) -> None:
    """Takes up where state() was taken. A state of another kind of device is left alone, which is said."""
    if saved.numel() != state(device).numel():
        log.warning("the checkpoint's random generator is of another kind of device; the one here goes on as it is")
    elif device.type == "cpu":
        torch.set_rng_state(saved)
    else:
        torch.get_device_module(device).set_rng_state(saved, device)


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Within, generators may be seeded and drawn from; afterwards they are as before."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
