"""Where an op comes from: the module that runs and the user's source line.

Forward ops take the innermost running module and the first Python frame outside torch. Autograd gives every graph
node the sequence number of the forward op that made it, so a backward op takes the place noted under its node's
number.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_OURS)) + os.sep
OUTSIDE = "(outside)"  # the path of what runs in no module of the model
_current_node = torch._C._current_autograd_node
_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def is_user_file(filename: str) -> bool:
    return not (filename.startswith((TORCH, _OURS, "<frozen")) or "/contextlib.py" in filename)


@functools.cache
def is_installed(filename: str) -> bool:
    """Python's own library, or a package: in this environment or in any other folder of packages, as a .pth file or PYTHONPATH adds them."""
    own = (TORCH, _PACKAGE, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen")
    return filename.startswith(own) or f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename


def short_path(filename: str) -> str:
    """A file name that does not depend on the machine: from the package or the current folder on."""
    for folder in (*sys.path, os.getcwd()):
        if folder and filename.startswith(os.path.join(folder, "")):
            return os.path.relpath(filename, folder)
    return os.path.basename(filename)


def _of_user(traceback: TracebackType | None) -> TracebackType | None:
    """The innermost entry of a traceback that is the user's."""
    found = None
    while traceback is not None:
        found = traceback if is_user_file(traceback.tb_frame.f_code.co_filename) else found
        traceback = traceback.tb_next
    return found


def user_place(traceback: TracebackType | None) -> str:
    """ "file.py:12" of the innermost user frame of a traceback, or "" when there is none."""
    found = _of_user(traceback)
    return f"{found.tb_frame.f_code.co_filename}:{found.tb_lineno}" if found is not None else ""


def user_globals(traceback: TracebackType | None) -> dict[str, Any] | None:
    """Of the code at that place."""
    found = _of_user(traceback)
    return found.tb_frame.f_globals if found is not None else None


def line_now(is_own: Callable[[str], bool] = is_user_file, frame: FrameType | None = None) -> str:
    """ "/home/.../file.py:12" of the user's line that runs now (with `frame`, that is there), in a file that `is_own`."""
    frame = frame or sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


class Sites:
    """Numbers modules and sources in the order they are met."""

    def __init__(self, model: nn.Module) -> None:
        self.paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(id(module), path)
        self.modules: dict[str, tuple[int, str]] = {}  # path -> id, class name
        self.sources: dict[str, int] = {}
        self.stack: list[str] = []  # " m3" of the running modules
        self.stack_paths: list[str] = []
        self.failed: str | None = None  # path of the innermost module that raised
        self._by_line: dict[tuple[CodeType, int], str] = {}
        self._is_user: dict[CodeType, bool] = {}
        self._by_sequence: dict[int, str] = {}

    def enter(self, module: nn.Module) -> None:
        path = self.paths.get(id(module))
        if path is None:  # a module outside the model, such as a criterion
            self.stack.append(self.stack[-1] if self.stack else "")
            self.stack_paths.append(self.stack_paths[-1] if self.stack_paths else OUTSIDE)
            return
        entry = self.modules.get(path)
        if entry is None:
            entry = self.modules[path] = (len(self.modules), type(module).__name__)
        self.stack.append(f" m{entry[0]}")
        self.stack_paths.append(path)

    def leave(self) -> None:
        self.stack.pop()
        self.stack_paths.pop()

    def forward_tags(self) -> str:
        """ " m3 s5" for the op being recorded; also noted for the autograd node that this op has just made."""
        tags = (self.stack[-1] if self.stack else "") + self._source(sys._getframe(2))
        self._by_sequence.setdefault(_sequence_number() - 1, tags)
        return tags

    def backward_tags(self) -> str:
        node = _current_node()
        if node is None:
            return ""
        return self._by_sequence.get(node._sequence_nr(), "")

    def place_of(self, tags: str) -> tuple[str | None, str]:
        """The module's path and "file:line" of an op's tags."""
        words = tags.split()
        modules = {f"m{i}": path for path, (i, _) in self.modules.items()}
        sources = {f"s{i}": place for place, i in self.sources.items()}
        path = next((modules[w] for w in words if w in modules), None)
        return path, next((sources[w] for w in words if w in sources), "")

    def place(self) -> str:
        """ "file.py:12" of the user's line that runs now."""
        return self.place_of(self._source(sys._getframe(1)))[1]

    def _source(self, frame: FrameType | None) -> str:
        known = self._is_user
        while frame is not None:
            code = frame.f_code
            user = known.get(code)
            if user is None:
                user = known[code] = is_user_file(code.co_filename)
            if user:
                key = (code, frame.f_lineno)
                tag = self._by_line.get(key)
                if tag is None:
                    place = f"{short_path(code.co_filename)}:{frame.f_lineno}"
                    tag = self._by_line[key] = f" s{self.sources.setdefault(place, len(self.sources))}"
                return tag
            frame = frame.f_back
        return ""
