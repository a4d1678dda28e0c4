"""Regions of a program compiled: Inductor's code generation for all of them in one file, kept on disk.

CPUs  funcs of a program ──lower──► C++ text ──library──► .so in the cache ──check──► which of it may be used
CUDA  funcs of a program ──lower──► Triton text ──cubins──► .cubins in the cache ──the driver──► which of it may be used
                          └──────────── beside: in a process of its own; bodies run meanwhile ────────────┘
"""

from interlace.regions.beside import Making, ready, wanted_of
from interlace.regions.cuda import has_kernels
from interlace.regions.kept import RegionsError, say_once
from interlace.regions.library import Library, Wanted, reason_of, say_bodies_run
from interlace.regions.loops import Loops
from interlace.regions.lower import TESTED

__all__ = [
    "TESTED", "Library", "Loops", "Making", "RegionsError", "Wanted", "has_kernels", "ready", "reason_of", "say_bodies_run", "say_once",
    "wanted_of",
]  # fmt: skip
