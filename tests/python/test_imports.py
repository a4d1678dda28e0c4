"""Imports of python/interlace: no circles between modules or packages, and no arrow that the table does not have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "python" / "interlace"
DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
COMPILED = {"_core", "_runtime"}  # extension modules: anybody may
# Which package may import which; docs/architecture.md has the same table. "interlace" is the front door, __init__.py.
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "private": set(),
    "version": set(),
    "config": {"errors"},
    "dist": {"errors"},
    "capture": {"errors", "files", "version"},
    "models": {"errors"},
    "data": {"errors", "files", "private"},
    "report": {"errors"},
    "cost": {"dist", "errors", "private"},
    "plan": {"capture", "errors", "files", "models"},
    "calibrate": {"config", "cost", "errors", "plan", "private", "version"},
    "observe": {"cost", "dist", "errors", "files"},
    "checkpoint": {"config", "dist", "errors"},
    "regions": {"private", "version"},
    "compiling": {"capture", "config", "cost", "dist", "errors", "files", "private", "regions", "version"},
    "train": {"capture", "checkpoint", "compiling", "config", "cost", "dist", "errors", "observe", "private"},
    "interlace": {"config", "errors", "train", "version"},
    "integrations": {"capture", "config", "dist", "errors", "interlace"},
    "cli": {
        "calibrate", "capture", "checkpoint", "compiling", "config", "cost", "data", "dist", "errors", "files", "interlace", "models",
        "observe", "plan", "private", "regions", "report", "version",
    },
}  # fmt: skip

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module by its full name; a package is its __init__."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports, wherever it does: in a function too, but not for types alone. A file with __getattr__
    imports later what it names for types."""
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not lazy:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in known or name in compiled else str(node.module) for name in inner)
        for child in ast.iter_child_nodes(node):
            visit(child)

    compiled = {f"interlace.{name}" for name in COMPILED}
    visit(tree)
    ours = {name for name in found if name.split(".")[0] == "interlace"}
    return {name for name in ours if not any(name == c or name.startswith(c + ".") for c in compiled)}


def module_graph() -> Graph:
    known = modules()
    graph = {name: imported(ast.parse(path.read_text()), known) - {name} for name, path in known.items()}
    strange = {(a, b) for a, several in graph.items() for b in several if b not in known}
    assert not strange, f"imports of modules that are not there: {strange}"
    return graph


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "interlace"


def package_graph() -> Graph:
    graph: Graph = {}
    for module, several in module_graph().items():
        package = package_of(module)
        graph.setdefault(package, set()).update({package_of(other) for other in several} - {package})
    return graph


def circle(graph: Graph) -> list[str] | None:
    """One circle, from its beginning to the same again, or None."""
    done: set[str] = set()

    def follow(node: str, way: list[str]) -> list[str] | None:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return None
        for other in sorted(graph.get(node, ())):
            found = follow(other, [*way, node])
            if found:
                return found
        done.add(node)
        return None

    return next((found for node in sorted(graph) if (found := follow(node, []))), None)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_what_counts_as_an_import() -> None:
    known = {name: Path() for name in ("interlace", "interlace.a", "interlace.a.b", "interlace.c", "interlace.d")}
    text = """
from typing import TYPE_CHECKING
from interlace import _core, c
from interlace._runtime import testing
from interlace.a import b, other
if TYPE_CHECKING:
    import interlace.d
def f():
    import interlace
"""
    assert imported(ast.parse(text), known) == {"interlace", "interlace.a", "interlace.a.b", "interlace.c"}
    lazy = text + "def __getattr__(name): ...\n"
    assert imported(ast.parse(lazy), known) == {"interlace", "interlace.a", "interlace.a.b", "interlace.c", "interlace.d"}


def test_no_circle_between_modules() -> None:
    found = circle(module_graph())
    assert found is None, " -> ".join(found or [])


def test_no_circle_between_packages() -> None:
    found = circle(package_graph())
    assert found is None, " -> ".join(found or [])


def test_packages_import_what_the_table_says() -> None:
    """No arrow more than it has, and none that nobody uses."""
    assert package_graph() == MAY_IMPORT


def test_the_document_has_the_same_table() -> None:
    rows = re.findall(r"^\| `interlace/(\w+?)(?:\.py)?` \|.*\| (.*?) \|$", DOCUMENT.read_text(), re.MULTILINE)
    told = {name: set(re.findall(r"\w+", arrows)) for name, arrows in rows}
    told["interlace"] = told.pop("__init__")
    assert told["cli"] == {"all"}
    assert {**told, "cli": MAY_IMPORT["cli"]} == MAY_IMPORT
