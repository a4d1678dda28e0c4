"""What the tests compile lies on INTERLACE_DEVICE; with "soft" torch has the software accelerator (tests/accelerator)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "python"))
import ranks  # noqa: E402  who runs tests side by side makes the folder, its workers have it from the environment

os.environ.setdefault("INTERLACE_CACHE", ranks.CACHE)  # what is not about captures has them once; the tests of the cache name their own
DEVICE = os.environ.get("INTERLACE_DEVICE", "cpu")
SOFT = DEVICE == "soft"
if SOFT:  # before torch is imported, here and in every process that a test starts
    folder = str(HERE / "accelerator" / "python")
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# What is not run again on a device. Single tests say it with @pytest.mark.host("reason").
HOST = {
    "texts, plans and simulations, which no device sees":
        "bench_common bench_network calibrate capture capture_check_ops capture_effects capture_errors capture_features capture_models "
        "capture_opaque chakra cli cli_files cli_width core cuts explain mutated_files plan plan_layers plan_solver random_programs report "
        "report_pages rules simulate simulate_sets tensor_auto tensor_pass",
    "code, documents and installation": "adding_an_op docs imports install names reference walls",
    "what CPUs have of their own: TCP between ranks, its store and secrets, a heap, loops, compiled libraries":
        "cli_launch comm data encryption fork_server kernels_backward kernels_norm kernels_optimizer page_heap power_loss "
        "region_driver regions regions_beside store cubins",
}  # fmt: skip

# What a real device does not give: a software one has the CPU's kernels, and lets what lies on the CPU take part.
REAL = {
    "the bits, or nearly so, of a CPU's kernels, which a real device does not have":
        "runtime_ops runtime_executor runtime_models runtime_ranks host_update muon opaque rule_loops",
    "a peak without what the device's libraries take beside": "offload::test_a_limit_changes_no_bit_and_is_kept "
        "evaluate::test_a_memory_limit_holds_and_optimizer_states_stay_out "
        "evaluate::test_parameters_come_one_by_one_where_the_limit_asks_for_it "
        "evaluate::test_gradients_that_lie_out_of_memory hybrid::test_memory_is_what_was_planned_to_the_byte "
        "reposition::test_a_flush_keeps_to_the_limit reposition::test_the_same_bits",
    "its model keeps to the CPU": "containers::test_a_table_that_the_first_run_makes containers::test_a_table_on_every_rank",
}  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`accelerator` tests run where there is one, `software` tests on that of tests/accelerator."""
    host = {f"test_{name}": why for why, names in HOST.items() for name in names.split()}
    if not SOFT:
        host |= {f"test_{name}": why for why, names in REAL.items() for name in names.split()}
    for item in items:
        if "software" in item.keywords and not SOFT:
            item.add_marker(pytest.mark.skip(reason="needs INTERLACE_DEVICE=soft"))
        mark = item.get_closest_marker("host")
        named = f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"
        why = mark.args[0] if mark else host.get(item.path.stem) or host.get(named)
        if DEVICE != "cpu" and why:
            item.add_marker(pytest.mark.skip(reason=f"not for devices: {why}"))
    if not any("accelerator" in item.keywords for item in items):
        return
    import torch

    for item in items:
        if "accelerator" in item.keywords and not torch.accelerator.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; INTERLACE_DEVICE=soft is one"))


def pytest_collection_finish() -> None:
    """What was imported lives as long as the tests: a collection of garbage would look at it for a fifth of a second."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def there() -> None:
    """Before fixtures of whole modules, which compile as well."""
    import on_device

    on_device.install()


@pytest.fixture(autouse=True)
def ordered() -> Iterator[None]:
    """On the software accelerator no test leaves out a wait."""
    if not SOFT:
        yield
        return
    import soft_device

    soft_device.take_reports()
    yield
    import torch

    torch.accelerator.synchronize()
    reports = soft_device.take_reports()
    soft_device._C.release_idle()
    assert reports == [], "waits that were left out"
