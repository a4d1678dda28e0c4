"""Chakra execution traces, decoded by a field-number table of their own (chakra_decoder.py) and replayed."""

from __future__ import annotations

import json

import chakra_decoder
import pytest
from simulation_support import STEP, sharded

from interlace import _core
from interlace.cli import app

CLUSTER = "a100-40gb-2"


def simulation(text: str, cluster: str = CLUSTER, **options):
    return _core.Simulation(_core.Program.parse(text), cluster, **options)


def nodes_of(text: str, rank: int = 0, **options):
    return chakra_decoder.read(simulation(text, **options).chakra(rank))


def value(node, name, field):
    got, number = node["attr"][name]
    assert got == field, f"{name} is a {got}: the readers ask for {field}"
    return number


@pytest.mark.parametrize("numbers", [[0], [1], [127, 128], [16383, 16384], [(1 << 64) - 1]])
def test_the_decoder_reads_varints(numbers):
    data = b""
    for number in numbers:
        while number > 127:
            data += bytes([number & 127 | 128])
            number >>= 7
        data += bytes([number])
    at, got = 0, []
    while at < len(data):
        number, at = chakra_decoder.varint(data, at)
        got.append(number)
    assert got == numbers


def test_nodes_are_the_ops_of_the_program():
    metadata, nodes = nodes_of(STEP.read_text())
    assert metadata["version"] == "1.0.0"
    assert metadata["attr"]["world_size"] == ("int64_val", 2)
    assert [node["id"] for node in nodes] == list(range(1, len(nodes) + 1))
    names = [node["name"] for node in nodes]
    expected = ["gather.start u0", "gather.start u1", "aten.mm", "aten.mm", "aten.mm", "reduce.start u1", "aten.mm", "aten.mm",
                "reduce.start u0", "update.sgd u0", "update.sgd u1"]  # fmt: skip
    assert [name for name in names if not name.startswith("grad.begin")] == expected
    for node in nodes:
        assert node["type"] == ("COMM_COLL_NODE" if ".start" in node["name"] else "COMP_NODE")
        assert value(node, "is_cpu_op", "bool_val") is False


def test_collectives_have_what_readers_ask_for():
    _, nodes = nodes_of(STEP.read_text())
    gather = next(node for node in nodes if node["name"] == "gather.start u0")
    reduce = next(node for node in nodes if node["name"] == "reduce.start u0")
    assert chakra_decoder.COMM_TYPES[value(gather, "comm_type", "int64_val")] == "ALL_GATHER"
    assert chakra_decoder.COMM_TYPES[value(reduce, "comm_type", "int64_val")] == "REDUCE_SCATTER"
    assert value(gather, "comm_size", "int64_val") == 524288 * 4, "the shard that a rank hands in"
    assert value(reduce, "comm_size", "int64_val") == 1048576 * 4, "the whole gradient"
    assert value(gather, "pg_name", "string_val") == "dp"
    assert value(gather, "lane", "string_val") == "gather"
    mm = next(node for node in nodes if node["name"] == "aten.mm")
    assert value(mm, "module", "string_val") == "fc1" and value(mm, "source", "string_val") == "net.py:12"


def test_times_are_those_of_the_trace():
    result = simulation(STEP.read_text())
    _, nodes = chakra_decoder.read(result.chakra(0))
    slices = [
        event for event in json.loads(result.trace())["traceEvents"] if event["ph"] == "X" and event["cat"] == "kernel"
    ]
    assert len(slices) == sum(value(node, "duration_ns", "int64_val") > 0 for node in nodes)
    for slice_ in slices:
        label = slice_["args"]["op"] + (" " + slice_["args"]["detail"] if "detail" in slice_["args"] else "")
        matching = [
            node for node in nodes
            if node["name"] == label and node.get("start_time_micros", 0) == int(slice_["ts"] + 0.5)
            and value(node, "duration_ns", "int64_val") == round(slice_["dur"] * 1e3)
        ]  # fmt: skip
        assert len(matching) == 1, label
        assert matching[0].get("duration_micros", 0) == int(slice_["dur"] + 0.5)


def test_dependencies_follow_storages_and_issue_order():
    _, nodes = nodes_of(STEP.read_text())
    by_name: dict[str, list] = {}
    for node in nodes:
        by_name.setdefault(node["name"], []).append(node)
    gather0, gather1 = by_name["gather.start u0"][0], by_name["gather.start u1"][0]
    mm = by_name["aten.mm"]
    assert gather0["data_deps"] == [] and gather0["ctrl_deps"] == []
    assert gather1["ctrl_deps"] == [gather0["id"]], "one lane, one after another"
    assert mm[0]["data_deps"] == [gather0["id"]] and mm[0]["ctrl_deps"] == [gather0["id"]], "waited for"
    assert mm[1]["data_deps"] == sorted([mm[0]["id"], gather1["id"]]), "through a view of the gathered unit"
    assert set(mm[2]["data_deps"]) >= {mm[0]["id"], mm[1]["id"]}
    reduce1 = by_name["reduce.start u1"][0]
    assert mm[2]["id"] in reduce1["data_deps"], "the gradient placed into the flat buffer"
    update0 = by_name["update.sgd u0"][0]
    assert by_name["reduce.start u0"][0]["id"] in update0["data_deps"]
    assert {by_name["reduce.start u0"][0]["id"], reduce1["id"]} <= set(update0["ctrl_deps"]), (
        "both waits stand before it"
    )


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_replay_in_the_order_of_dependencies(accumulation):
    """Every node starts after all that it depends on has ended, as simulated: any replay may rely on it."""
    _, nodes = nodes_of(sharded(2, accumulation))
    known: dict[int, tuple[int, int]] = {}
    for node in nodes:
        start = node.get("start_time_micros", 0) * 1000
        end = start + value(node, "duration_ns", "int64_val")
        for before in [*node["data_deps"], *node["ctrl_deps"]]:
            assert before in known, "a node comes after its dependencies in the file"
            assert known[before][1] <= start + 1000, f"{node['name']} starts before {before} has ended"
        known[node["id"]] = (start, end)
    gathers = [node for node in nodes if node["name"].startswith("gather.start")]
    assert len(gathers) % accumulation == 0 and len(gathers) >= 2 * accumulation


def test_uneven_ranks_have_files_of_their_own(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert app.run(["simulate", str(STEP), "--cluster", CLUSTER, "--slow", "1=2", "--chakra", "uneven"]) == 0
    assert app.run(["simulate", str(STEP), "--cluster", CLUSTER, "--chakra", "even"]) == 0
    uneven = [(tmp_path / "uneven" / f"step.{rank}.et").read_bytes() for rank in range(2)]
    even = [(tmp_path / "even" / f"step.{rank}.et").read_bytes() for rank in range(2)]
    assert even[0] == even[1] and uneven[0] != uneven[1]
    assert chakra_decoder.read(even[0])[0]["attr"]["ranks_are_alike"] == ("bool_val", True)
    assert chakra_decoder.read(uneven[0])[0]["attr"]["ranks_are_alike"] == ("bool_val", False)
    slow, fast = (
        sum(
            value(node, "duration_ns", "int64_val")
            for node in chakra_decoder.read(data)[1]
            if node["type"] == "COMP_NODE"
        )
        for data in reversed(uneven)
    )
    assert slow == pytest.approx(2 * fast, rel=0.02)


def test_a_rank_that_was_not_simulated():
    with pytest.raises(_core.Error, match="rank 1 was not simulated; 1 were"):
        simulation(STEP.read_text()).chakra(1)


def test_googles_protobuf_reads_it_too():
    """Where the protobuf package is installed: the same through a descriptor made from the table."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="chakra", syntax="proto3")
    kinds = {
        "uint": 4,
        "uint*": 4,
        "string": 9,
        "enum": 5,
        "bytes": 12,
        "double": 1,
        "float": 2,
        "int": 3,
        "bool": 8,
        "attribute*": 11,
    }
    for name, table in (("Attribute", chakra_decoder.ATTRIBUTE), ("Node", chakra_decoder.NODE)):
        entry = file.message_type.add(name=name)
        for number, (field, kind) in table.items():
            added = entry.field.add(name=field, number=number, type=kinds[kind], label=3 if kind.endswith("*") else 1)
            if kind == "attribute*":
                added.type_name = ".chakra.Attribute"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    node_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("chakra.Node"))
    data = simulation(STEP.read_text()).chakra(0)
    ours = chakra_decoder.read(data)[1]
    size, at = chakra_decoder.varint(data, 0)
    at += size
    for expected in ours:
        size, at = chakra_decoder.varint(data, at)
        node = node_class.FromString(data[at : at + size])
        at += size
        assert (node.id, node.name, list(node.data_deps)) == (expected["id"], expected["name"], expected["data_deps"])
    assert at == len(data)
