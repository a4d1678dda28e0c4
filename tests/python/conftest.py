"""Shared by all Python tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # or threads that wait for one another take the cores of the other workers
# pytest-xdist ignores Ctrl-C, and the commands that tests start would do so too.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The longest files, longest first: with --dist loadfile they start first, so that all workers have work to the end.
LONG = (
    "test_regions_beside", "test_regions", "test_pipeline_training", "test_tensor_parallel", "test_schedule_bits", "test_parity",
    "test_hybrid", "test_transformers_trainer", "test_rule_loops", "test_examples", "test_precision", "test_reposition",
    "test_transformers_cases", "test_profile", "test_laid_by", "test_adding_an_op", "test_unlike_stages", "test_encryption",
    "test_streams", "test_zoo", "test_refreeze", "test_schedule", "test_cubins", "test_pipeline_search", "test_recompute", "test_offload",
    "test_cli_train", "test_trainer_bits", "test_shapes", "test_any_form", "test_host_update", "test_unlike_tensor", "test_install",
    "test_trainer", "test_autocast", "test_checkpoint", "test_interrupt", "test_muon", "test_reads", "test_region_driver",
    "test_evaluate", "test_capture_features", "test_opaque", "test_faults", "test_plan_training", "test_tensor_pass", "test_verify_steps",
    "test_plan", "test_optimizers", "test_bench_network", "test_usable", "test_swap", "test_cache", "test_numbers", "test_plan_here",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`soak` tests run with INTERLACE_SOAK=1 or -m soak. Long files come first."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    soak = os.environ.get("INTERLACE_SOAK") == "1" or "soak" in (config.getoption("-m") or "")
    for item in items:
        if "soak" in item.keywords and not soak:
            item.add_marker(pytest.mark.skip(reason="the long form: make soak, or INTERLACE_SOAK=1"))


@pytest.fixture
def unsaid() -> Iterator[None]:
    """Nothing was said yet of compilers, and none was looked for."""
    from interlace.regions import kept, library

    kept._said.clear()
    library._compiler.cache_clear()
    yield
    library._compiler.cache_clear()
