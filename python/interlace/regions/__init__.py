"""Regions of a program compiled: Inductor's code generation for all of them in one library, kept on disk, compared with their bodies.

funcs of a program ──lower──► C++ text ──library──► .so in the cache ──check──► which of it may be used
                    └──────────── beside: in a process of its own; bodies run meanwhile ────────────┘
"""

from interlace.regions.beside import Making, ready
from interlace.regions.kept import RegionsError
from interlace.regions.library import Library, Wanted, reason_of, say_bodies_run
from interlace.regions.lower import TESTED

__all__ = ["TESTED", "Library", "Making", "RegionsError", "Wanted", "ready", "reason_of", "say_bodies_run"]
