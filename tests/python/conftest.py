"""Shared by all Python tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("INTERLACE_CACHE", "off")  # the tests of the cache name folders of their own
# pytest-xdist ignores Ctrl-C, and the commands that tests start would do so too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`soak` tests run with INTERLACE_SOAK=1 or -m soak; `accelerator` tests where there is one."""
    soak = os.environ.get("INTERLACE_SOAK") == "1" or "soak" in (config.getoption("-m") or "")
    for item in items:
        if "soak" in item.keywords and not soak:
            item.add_marker(pytest.mark.skip(reason="the long form: make soak, or INTERLACE_SOAK=1"))
        if "accelerator" in item.keywords:
            import torch

            if not torch.accelerator.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
