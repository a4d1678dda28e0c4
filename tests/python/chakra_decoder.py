"""Reads Chakra execution traces: protobuf's wire format and the field numbers of the public schema, written down here by themselves.

Source of the numbers: schema/protobuf/et_def.proto of github.com/mlcommons/chakra. A file is a GlobalMetadata message and then
Node messages, each behind its length as a varint (src/third_party/utils/protolib.py there).
"""

from __future__ import annotations

import struct
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

# field number: (name, how to read it)
METADATA = {1: ("version", "string"), 2: ("attr", "attribute*")}
NODE = {
    1: ("id", "uint"),
    2: ("name", "string"),
    3: ("type", "enum"),
    4: ("ctrl_deps", "uint*"),
    5: ("data_deps", "uint*"),
    6: ("start_time_micros", "uint"),
    7: ("duration_micros", "uint"),
    8: ("inputs", "bytes"),
    9: ("outputs", "bytes"),
    10: ("attr", "attribute*"),
}
ATTRIBUTE = {
    1: ("name", "string"),
    2: ("doc_string", "string"),
    3: ("double_val", "double"),
    5: ("float_val", "float"),
    7: ("int32_val", "int"),
    9: ("int64_val", "int"),
    11: ("uint32_val", "uint"),
    13: ("uint64_val", "uint"),
    27: ("bool_val", "bool"),
    29: ("string_val", "string"),
    31: ("bytes_val", "bytes"),
}
NODE_TYPES = ["INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE",
              "COMM_COLL_NODE"]  # fmt: skip
COMM_TYPES = ["ALL_REDUCE", "REDUCE", "ALL_GATHER", "GATHER", "SCATTER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER",
              "REDUCE_SCATTER_BLOCK", "BARRIER"]  # fmt: skip


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            assert value < 1 << 64
            return value, at


def fields(data: bytes) -> list[tuple[int, int, Any]]:
    """(field number, wire type, raw value) in order."""
    out, at = [], 0
    while at < len(data):
        tag, at = varint(data, at)
        number, wire = tag >> 3, tag & 7
        assert number > 0
        if wire == VARINT:
            value, at = varint(data, at)
        elif wire == BYTES:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
            assert len(value) == size, "cut off"
        elif wire == FIXED64:
            (value,), at = struct.unpack_from("<d", data, at), at + 8
        else:
            assert wire == FIXED32, f"wire type {wire}"
            (value,), at = struct.unpack_from("<f", data, at), at + 4
        out.append((number, wire, value))
    return out


def message(data: bytes, table: dict[int, tuple[str, str]]) -> dict[str, Any]:
    out: dict[str, Any] = {name: [] for name, kind in table.values() if kind.endswith("*")}
    for number, wire, raw in fields(data):
        name, kind = table[number]
        if kind == "uint*":
            assert wire == BYTES, "proto3 packs repeated numbers"
            at = 0
            while at < len(raw):
                value, at = varint(raw, at)
                out[name].append(value)
        elif kind == "attribute*":
            assert wire == BYTES
            out[name].append(message(raw, ATTRIBUTE))
        else:
            assert wire == {"string": BYTES, "bytes": BYTES, "double": FIXED64, "float": FIXED32}.get(kind, VARINT)
            assert name not in out, f"{name} twice"
            out[name] = scalar(raw, kind)
    return out


def scalar(raw: Any, kind: str) -> Any:
    if kind == "string":
        return raw.decode()
    if kind == "bool":
        assert raw in (0, 1)
        return bool(raw)
    if kind == "int":
        return raw - (1 << 64) if raw >> 63 else raw
    return raw


def read(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Metadata and nodes; attributes of a node as a dict of name to (field, value)."""
    messages, at = [], 0
    while at < len(data):
        size, at = varint(data, at)
        assert at + size <= len(data), "cut off"
        messages.append(data[at : at + size])
        at += size
    nodes = [message(each, NODE) for each in messages[1:]]
    for node in nodes:
        node["attr"] = attributes(node["attr"])
        node["type"] = NODE_TYPES[node.get("type", 0)]
    metadata = message(messages[0], METADATA)
    metadata["attr"] = attributes(metadata["attr"])
    return metadata, nodes


def attributes(found: list[dict[str, Any]]) -> dict[str, tuple[str, Any]]:
    out = {}
    for each in found:
        ((field, value),) = [(name, value) for name, value in each.items() if name not in ("name", "doc_string")]
        assert each["name"] not in out
        out[each["name"]] = (field, value)
    return out
