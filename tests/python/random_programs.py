"""Programs by seed, as a file might bring them: legal steps after passes, texts that somebody changed, single calls of any operator.

    python tests/python/random_programs.py SEED           # runs it in a child; where that dies, prints the smallest text that does

The verifier is content with all of them. Running them may end in an error or in numbers, and in nothing else (program_worker.py).
"""

from __future__ import annotations

import functools
import math
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from interlace import _core, _runtime

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LARGEST = 1 << 20  # elements of a value: more is legal and only takes time
DTYPES = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "b8", "c64")
ODD = (0, 1, -1, 2, 3, 5, 7, 64, 1 << 20, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63) + 1, -2, -100)
TYPE = re.compile(r"\b(?:f64|f32|f16|bf16|i64|i32|i16|i8|u8|b8|c64|c128)\[([\d,]*)\]")


def program(seed: int) -> tuple[str, str]:
    """How it was made, and its text. The same for the same seed, torch and goldens."""
    choice = random.Random(seed)
    kind = "legal" if seed % 10 == 0 else "changed" if seed % 10 < 5 else "call"
    make = {"legal": legal, "changed": changed, "call": call}[kind]
    for _ in range(50):
        text = make(choice)
        try:
            _core.Program.parse(text, "random").verify()
        except _core.Error:
            continue
        if all(math.prod(int(n) for n in sizes.split(",") if n) <= LARGEST for sizes in TYPE.findall(text)):
            return kind, text
    return "legal", legal(choice)


# ---- legal steps ----


def legal(choice: random.Random) -> str:
    text = _core.testing.random_program(choice.getrandbits(32), choice.randint(1, 6), choice.choice([3, 13, 40]), choice.random() < 0.3)
    return passed(choice, text)


def passed(choice: random.Random, text: str) -> str:
    """After passes for one rank; as it was, where they do not take it."""
    passes = ["canonicalize"] if choice.random() < 0.7 else []
    passes += ["fuse(min=1)"] if choice.random() < 0.2 else []
    passes += [choice.choice(["shard", "zero1", "replicate"]) + "(ranks=1)"]
    passes += [f"accumulate(steps={choice.randint(1, 3)},mode={choice.choice(['reduce_each', 'reduce_last'])})"]
    passes += [choice.choice(["update", "update(clip=1.0)", "update(clip=none)"])]
    passes += choice.sample(["reorder", "prefetch", "overlap_update", "canonicalize", "reposition_update"], choice.randint(0, 2))
    program = _core.Program.parse(text, "random")
    try:
        program.run_passes(",".join(passes[: choice.randint(0, len(passes))]))
    except _core.Error:
        return text
    return program.print()


# ---- texts that somebody changed ----


@functools.cache
def bases() -> list[str]:
    """Texts that run on one rank: small models, as they were captured and after passes."""
    choice = random.Random(0)
    texts = [path.read_text() for path in sorted((GOLDEN / "executed").glob("*.il"))]
    texts += [(GOLDEN / "passes" / name).read_text() for name in ("mlp.il", "attention.il", "mixed.il", "mlp.shard1.il")]
    for text in list(texts[:6]):
        texts += [passed(choice, text) for _ in range(3)]
    return texts


def changed(choice: random.Random) -> str:
    text = choice.choice(bases())
    for _ in range(choice.choice([1, 1, 1, 2, 2, 3])):
        text = choice.choice(CHANGES)(choice, text)
    return text


def _replace(choice: random.Random, text: str, pattern: str, by: Callable[[str], str]) -> str:
    """One place that matches."""
    places = list(re.finditer(pattern, text))
    if not places:
        return text
    at = choice.choice(places)
    return text[: at.start()] + by(at[0]) + text[at.end() :]


def _number(choice: random.Random, text: str) -> str:
    near = lambda old: str(choice.choice([int(old) + 1, int(old) - 1, int(old) * 2, choice.choice(ODD)]))  # noqa: E731
    return _replace(choice, text, r"(?<=[\[\{,(+= ])-?\d+(?=[\],}) ])", near)


def _size(choice: random.Random, text: str) -> str:
    """The same size wherever it stands, so that more of the text still fits."""
    sizes = sorted({n for sizes in TYPE.findall(text) for n in sizes.split(",") if n})
    if not sizes:
        return text
    old, new = choice.choice(sizes), str(choice.choice([1, 2, 3, 5, 8, 16, 0]))
    return re.sub(rf"(?<=[\[,]){old}(?=[\],])", new, text)


def _type(choice: random.Random, text: str) -> str:
    return _replace(choice, text, r"\b(?:f64|f32|f16|bf16|i64|i32|b8)\b", lambda _: choice.choice(DTYPES))


def _operator(choice: random.Random, text: str) -> str:
    return _replace(choice, text, r"aten\.\w+(?:\.\w+)?", lambda _: choice.choice(operators()))


def _value(choice: random.Random, text: str) -> str:
    names = re.findall(r"%\d+", text)
    return _replace(choice, text, r"%\d+", lambda _: choice.choice(names))


def _place(choice: random.Random, text: str) -> str:
    return _replace(choice, text, r" (in|into) %\d+\+\d+", lambda old: choice.choice(["", old.replace("into", "in"), old + "0"]))


def _line(choice: random.Random, text: str) -> str:
    lines = text.split("\n")
    body = [i for i, line in enumerate(lines) if line.startswith("  ")]
    if len(body) < 2:
        return text
    at, other = choice.sample(body, 2)
    line = lines[at]
    kind = choice.randrange(3)
    if kind < 2:
        del lines[at]
    if kind > 0:
        if kind == 2:  # with results of its own
            line = re.sub(r"%(\d+):", lambda m: f"%{int(m[1]) + 100000}:", line)
        lines.insert(other, line)
    return "\n".join(lines)


def _argument(choice: random.Random, text: str) -> str:
    pattern = r"(?<=[(=\s])(?:none|true|false|-?\d[\d.e-]*)(?=[,)])"
    others = ["none", "true", "false", "inf", "nan", "[]", "[0,1]", str(choice.choice(ODD))]
    return _replace(choice, text, pattern, lambda _: choice.choice(others))


CHANGES = (_number, _number, _size, _type, _operator, _operator, _value, _value, _place, _line, _line, _argument)


# ---- one call ----


@functools.cache
def schemas() -> dict[str, torch._C.FunctionSchema]:
    """By the name in a program: all overloads of the operators that a file may use."""
    allowed = set(_runtime.testing.file_operators())
    return {
        (s.name.replace("::", ".") + (f".{s.overload_name}" if s.overload_name else "")): s
        for s in torch._C._jit_get_all_schemas() if s.name in allowed and not any(a.is_out for a in s.arguments)
    }  # fmt: skip


@functools.cache
def operators() -> list[str]:
    return sorted(schemas())


WORDS = {
    "ScalarType": ("f32", "f64", "i64", "f16", "b8", "99"), "Layout": ("none", "strided", "1", "7"),
    "MemoryFormat": ("none", "contiguous", "channels_last", "9"), "bool": ("true", "false"), "Device": ("none",), "Generator": ("none",),
    "str": ('"none"', '"tanh"', '"mean"', '"floor"', '"trunc"'), "number": ("0", "1", "2.5", "-1", "nan", "true", "9223372036854775807"),
    "float": ("0.0", "0.5", "1.0", "-1.0", "nan", "inf", "1e-30", "1e300"),
}  # fmt: skip


def call(choice: random.Random) -> str:
    """One operator, its arguments drawn by their types; what it gives is looked at only after it ran."""
    name = choice.choice(operators())
    schema = schemas()[name]
    shape = [choice.choice([1, 2, 2, 3, 4, 6]) for _ in range(4)]
    inputs = []
    for i in range(6):
        dims = choice.choice([0, 1, 2, 2, 3, 4, 4, 4])
        sizes = shape[: dims] if choice.random() < 0.5 else shape[4 - dims :]
        if choice.random() < 0.25:
            sizes = [choice.choice([0, 1, n, n + 1, 9]) for n in sizes]
        dtype = choice.choice(["f32", "f32", "f32", "i64", "i64", choice.choice(DTYPES[:-1])])
        inputs.append((f"%{i}", f"{dtype}[{','.join(map(str, sizes))}]"))
    floats, integers = [[n for n, t in inputs if t.startswith(k)] or ["%0"] for k in ("f", "i")]

    def value(type: str, argument: str) -> str:
        if type.startswith("Optional["):
            return "none" if choice.random() < 0.4 else value(type[9:-1], argument)
        if type == "Tensor":
            indices = any(word in argument for word in ("ind", "target"))
            names = integers if indices and choice.random() < 0.9 else floats if choice.random() < 0.7 else [n for n, _ in inputs]
            return choice.choice(names)
        if type.startswith("List["):
            count = len(shape) if "size" in argument or "shape" in argument else choice.choice([1, 1, 2, 2, 3, 4])
            if argument in ("size", "normalized_shape", "input_sizes") and choice.random() < 0.6:
                return "[" + ",".join(map(str, shape[choice.randrange(4) :])) + "]"
            if argument == "output_mask":
                count = 3
            return "[" + ", ".join(value(type[5:-1], argument) for _ in range(count)) + "]"
        if type == "int":
            return str(choice.choice([0, 1, 2, 3, -1, -2, *shape, choice.choice(ODD)]))
        return choice.choice(WORDS.get(type, ("none",)))

    arguments, written = [], []
    for argument in schema.arguments:
        if argument.kwarg_only and choice.random() < 0.7 and argument.has_default_value():
            continue
        kind = str(argument.type)
        found = value(kind, argument.name)
        if argument.name in WORDS_BY_NAME and kind != "Tensor":
            found = choice.choice(WORDS_BY_NAME[argument.name])
        arguments.append(f"{argument.name}={found}" if argument.kwarg_only else found)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(found)
    results = "" if written else ", ".join(f"%{10 + i}: f32[2]" for i in range(len(schema.returns))) + " = "
    writes = f" writes=[{', '.join(written)}]" if written else ""
    lines = ["interlace 1 captured", 'module 0 "m" "M"', *(f'input {n}: {t} "x{n[1:]}"' for n, t in inputs)]
    lines += ["phase micro_batch takes () gives () {", f"  {results}{name}({', '.join(arguments)}) {{fwd{writes}}}"]
    lines += [f'  output({"%0" if written else "%10"}) {{fwd name="y"}}', "}"]
    return "\n".join(lines) + "\n"


# The schemas of the dispatcher have numbers for these.
WORDS_BY_NAME = {"dtype": WORDS["ScalarType"], "layout": WORDS["Layout"], "memory_format": WORDS["MemoryFormat"]}


# ---- the smallest text that dies ----


def dies(text: str) -> bool:
    """In a child of this process, which has torch already."""
    child = os.fork()
    if child == 0:
        from program_worker import run

        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            run(text, 0)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def reduced(text: str) -> str:
    """Without the lines that make no difference."""
    lines = text.split("\n")
    for i in reversed(range(len(lines))):
        fewer = lines[:i] + lines[i + 1 :]
        if dies("\n".join(fewer)):
            lines = fewer
    return "\n".join(lines)


if __name__ == "__main__":
    made, found = program(int(sys.argv[1]))
    print(f"# {made}\n{reduced(found) if dies(found) else '# it does not die' + chr(10) + found}")
