"""mkdocs hooks: pages that lie outside docs/ become pages of the site, and files that a page links to lie beside it.

    README.md → index.md     bench/README.md → bench.md     a link to ../examples/lora.py → files/examples/lora.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "README.md": "index.md", "bench/README.md": "bench.md", "examples/README.md": "examples.md", "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}  # fmt: skip
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def pages() -> dict[str, str]:
    """Every page's file in the repository, and its name in the site."""
    inside = {f"docs/{path.name}": path.name for path in sorted((ROOT / "docs").iterdir())}
    return OUTSIDE | inside


def target_of(origin: str, target: str) -> str:
    """The file of the repository that a link in another one leads to; a folder stands for its README."""
    path = os.path.normpath(os.path.join(os.path.dirname(origin), target))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def links(origin: str) -> list[str]:
    """Files of the repository that a page links to."""
    found = [match[1] for match in LINK.finditer((ROOT / origin).read_text())]
    return [target_of(origin, target) for target in found if "://" not in target]


def on_files(files: Any, config: Any) -> Any:
    known = pages()
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    linked = {path for origin in known if origin.endswith(".md") for path in links(origin)}
    for path in sorted(linked - set(known)):
        files.append(File.generated(config, f"files/{path}.txt", content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    known = pages()
    origin = next(path for path, name in known.items() if name == page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        if "://" in match[1]:
            return match[0]
        path = target_of(origin, match[1])
        return f"]({known.get(path) or f'files/{path}.txt'}{match[2] or ''})"

    return LINK.sub(rewritten, markdown).replace("```python runnable", "```python")
