"""Regions of a program compiled: Inductor's code generation for all of them in one library, kept on disk, compared with their bodies.

funcs of a program ──lower──► C++ text ──library──► .so in the cache ──check──► which of it may be used
"""

from interlace.regions.library import Library, ready
from interlace.regions.lower import TESTED

__all__ = ["TESTED", "Library", "ready"]
