"""Config: values, messages, the pipeline it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.config import Config, ConfigError, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"acumulation": 4},
            "unknown setting 'acumulation'; did you mean 'accumulation'? (settings: strategy, mesh, tensor, ",
        ),
        (
            {"strategy": "shrd"},
            "strategy must be one of 'shard', 'replicate', 'zero1', not 'shrd'; did you mean 'shard'?",
        ),
        ({"strategy": 3}, "strategy must be one of 'shard', 'replicate', 'zero1', not 3"),
        ({"accumulation": 0}, "accumulation must be a whole number of at least 1, not 0"),
        ({"accumulation": 2.0}, "accumulation must be a whole number of at least 1, not 2.0"),
        ({"accumulate_mode": "each"}, "accumulate_mode must be one of 'auto', 'reduce_each', 'reduce_last', not 'each'"),
        ({"clip_norm": 0}, "clip_norm must be a positive number, not 0"),
        ({"clip_norm": float("nan")}, "clip_norm must be a positive number, not nan"),
        ({"timeout_s": -1}, "timeout_s must be a positive number, not -1"),
        ({"fullgraph": "no"}, "fullgraph must be True or False, not 'no'"),
        ({"mode": "eagre"}, "mode must be one of 'compiled', 'eager', not 'eagre'; did you mean 'eager'?"),
        (
            {"memory_limit": "20 GiBs"},
            '\'20 GiBs\' is not a size in bytes; write for example "20GiB", "512MB" or 1000000000',
        ),
        ({"memory_limit": 0}, "a size in bytes must be positive and below 2^63, not 0"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Config.from_dict(values)
    assert str(e.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GiB", 20 << 30),
        ("512 MB", 512 * 10**6),
        ("1.5k", 1500),
        (123, 123),
        ("1e9", 10**9),
        ("7B", 7),
        ("2Ti", 2 << 40),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


def test_sizes_are_printed_for_people() -> None:
    assert [format_bytes(n) for n in (5, 2048, 3 << 20, 1 << 50)] == ["5 B", "2.00 KiB", "3.00 MiB", "1024.00 TiB"]


def test_pipelines() -> None:
    assert Config().pipeline(2) == "canonicalize,shard(axis=dp,ranks=2),update(clip=none,norm=auto,momentum=true)"
    config = Config(strategy="zero1", accumulation=4, accumulate_mode="reduce_last", clip_norm=1)
    assert config.pipeline(3, momentum=False) == (
        "canonicalize,zero1(axis=dp,ranks=3),accumulate(steps=4,mode=reduce_last),update(clip=1.0,norm=auto,momentum=false)"
    )
    assert Config(skip_nonfinite=True).pipeline(1).endswith("update(clip=none,norm=always,momentum=true)")
    assert Config(passes="canonicalize,shard(ranks={ranks})").pipeline(8) == "canonicalize,shard(ranks=8)"


def test_a_config_is_frozen_and_goes_through_a_dict() -> None:
    config = Config(memory_limit="1GiB", clip_norm=2)
    assert config.memory_limit == 1 << 30 and config.clip_norm == 2.0
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(AttributeError):
        config.seed = 3  # type: ignore[misc]


def test_fewer_micro_batches_than_stages_are_said_with_what_they_cost() -> None:
    assert Config(mesh={"pp": 4, "dp": 2}, accumulation=2).few_micro_batches == (
        "accumulation=2 gives fewer micro-batches than the 4 stages of the pipeline: each stage stands still for about 60 % of a step, "
        "with accumulation=16 for about 16 %"
    )
    assert Config(mesh={"pp": 4, "dp": 2}, accumulation=4).few_micro_batches == Config(accumulation=1).few_micro_batches == ""


def test_borders_of_stages_are_a_text_or_a_list() -> None:
    assert Config(mesh={"pp": 3}, stages=["h.2", "h.4"]) == Config(mesh={"pp": 3}, stages="h.2+h.4")
