"""Sets up the Python side: the environment, torch, the packages, and Interlace itself built against that torch.

    python3 tools/setup/setup.py tools     # an environment with cmake and ninja
    python3 tools/setup/setup.py packages  # and torch, the runtime packages, pytest: all that `test` installs and does not build
    python3 tools/setup/setup.py build     # tools, torch, the runtime packages, and interlace
    python3 tools/setup/setup.py test      # and pytest, and interlace with `_runtime.testing`
    python3 tools/setup/setup.py dev       # and ruff, mypy

Uses an active environment (VIRTUAL_ENV, CONDA_PREFIX) that already has torch as it is; else makes .venv, which sees the
torch of the python3 on the path if that has one. TORCH=... is the requirement that is installed instead of the default.
The path of the chosen interpreter goes to build/python-path. What was done is remembered in the environment, so a
second run does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD_TOOLS = ["scikit-build-core>=0.10", "pybind11>=2.13", "cmake>=3.22", "ninja"]
TORCH = "torch==2.13.0"
LEVELS = ["tools", "packages", "build", "test", "dev"]


def say(text: str) -> None:
    print(f"» {text}", flush=True)


def run(command: list[str], what: str, **environment: str) -> None:
    start = time.monotonic()
    say(what)
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        sys.exit(f"error: {what} failed (exit code {result.returncode}, see above)\n  {' '.join(command)}")
    seconds = time.monotonic() - start
    if seconds >= 5:
        say(f"  done in {seconds:.0f} s")


def torch_version(python: str) -> str | None:
    """The version of the torch that an interpreter sees, without importing it."""
    code = "import importlib.metadata as m; print(next((d.version for d in m.distributions(name='torch')), ''))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def works(python: str) -> bool:
    """Whether there is such an interpreter and it has pip."""
    try:
        return subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def choose_python() -> str:
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = os.environ.get(name)
        if active and Path(active).resolve() != (ROOT / ".venv").resolve():
            python = str(Path(active) / "bin" / "python")
            if torch_version(python):
                say(f"using the active environment {active} and its torch {torch_version(python)}")
                return python
    venv = ROOT / ".venv"
    python = str(venv / "bin" / "python")
    if not works(python):
        shutil.rmtree(venv, ignore_errors=True)
        base = os.environ.get("PYTHON") or getattr(sys, "_base_executable", sys.executable)
        shared = ["--system-site-packages"] if torch_version(base) and "TORCH" not in os.environ else []
        run([base, "-m", "venv", *shared, str(venv)], "making the environment .venv")
    return python


class Done:
    """What was done in an environment for this checkout: a small JSON file inside the environment."""

    def __init__(self, python: str):
        command = [python, "-c", "import sys; print(sys.prefix)"]
        prefix = subprocess.run(command, capture_output=True, text=True, check=True)
        name = hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
        self.file = Path(prefix.stdout.strip()) / f"interlace-setup-{name}.json"
        try:
            self.facts = json.loads(self.file.read_text())
        except (OSError, ValueError):
            self.facts = {}

    def is_(self, key: str, value: str) -> bool:
        return self.facts.get(key) == value

    def set(self, key: str, value: str) -> None:
        self.facts[key] = value
        self.file.write_text(json.dumps(self.facts, indent=1) + "\n")


def pip(python: str, arguments: list[str], what: str, **environment: str) -> None:
    run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments], what, **environment)


def install(python: str, done: Done, key: str, requirements: list[str]) -> None:
    """Installs requirements unless the same ones were installed before; the torch that is there stays as it is."""
    if done.is_(key, " ".join(requirements)):
        return
    version = torch_version(python)
    constraint = ROOT / "build" / "constraint.txt"
    constraint.write_text(f"torch=={version}\n" if version else "")
    pip(python, ["--constraint", str(constraint), *requirements], f"installing {', '.join(requirements)}")
    done.set(key, " ".join(requirements))


def install_torch(python: str, done: Done) -> None:
    wanted = os.environ.get("TORCH", "")
    have = torch_version(python)
    if have and (not wanted or done.is_("torch", wanted)):
        return
    requirement = wanted or TORCH
    if not wanted:
        # The CPU-only build is a tenth of the size; where the package index has no such build, the plain one is taken.
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{TORCH}+cpu"]
        say(f"installing {TORCH} (about a minute)")
        start = time.monotonic()
        if subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            say(f"  done in {time.monotonic() - start:.0f} s")
            done.set("torch", requirement)
            return
    pip(python, requirement.split(), f"installing {requirement}")
    done.set("torch", requirement)


def project() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources_digest(python: str) -> str:
    """Changes when anything that goes into the package does: sources, build files, interpreter, torch."""
    hasher = hashlib.sha256(f"{python} {torch_version(python)}".encode())
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    for folder in ("cmake", "src", "python", "tools/interlace-opt", "tests/accelerator"):
        files += [f for f in (ROOT / folder).rglob("*") if f.is_file() and f.suffix != ".so" and "__pycache__" not in f.parts]
    for file in sorted(files):
        hasher.update(f"{file.relative_to(ROOT)}\n".encode())
        hasher.update(file.read_bytes())
    return hasher.hexdigest()[:16]


def build_package(python: str, done: Done, testing: bool) -> None:
    """Builds and installs interlace, with `_runtime.testing` when tests want it or ever wanted it here."""
    digest = sources_digest(python)
    had_testing = done.is_("testing", "yes")
    if done.is_("package", digest) and (had_testing or not testing):
        return
    testing = testing or had_testing
    against = f"{python} {torch_version(python)}"
    mark = ROOT / "build" / "full-against"
    if mark.exists() and mark.read_text() != against:
        shutil.rmtree(ROOT / "build" / "full", ignore_errors=True)
    mark.write_text(against)
    tools = str(Path(python).parent)
    pip(
        python,
        ["--no-build-isolation", "--no-deps", "--force-reinstall", "."],
        "building interlace",
        INTERLACE_TESTING="ON" if testing else "OFF",
        PATH=f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
        CMAKE_BUILD_PARALLEL_LEVEL=os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1)),
    )
    done.set("package", digest)
    done.set("testing", "yes" if testing else "no")


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - whatever python3 is there runs this file
        sys.exit(f"error: Python 3.10 or newer is needed, not {sys.version.split()[0]}; name another with PYTHON=...")
    if len(sys.argv) != 2 or sys.argv[1] not in LEVELS:
        sys.exit(f"usage: setup.py {'|'.join(LEVELS)}")
    level = LEVELS.index(sys.argv[1])
    (ROOT / "build").mkdir(exist_ok=True)
    python = choose_python()
    done = Done(python)
    install(python, done, "tools", BUILD_TOOLS)
    if level >= LEVELS.index("packages"):
        install_torch(python, done)
        install(python, done, "runtime", [*project()["dependencies"], *project()["optional-dependencies"]["transformers"]])
    if sys.argv[1] != "build" and level >= LEVELS.index("packages"):
        install(python, done, "test", project()["optional-dependencies"]["test"])
    if level >= LEVELS.index("build"):
        build_package(python, done, testing=sys.argv[1] == "test")
    if level >= LEVELS.index("dev"):
        install(python, done, "dev", project()["optional-dependencies"]["dev"])
    path = ROOT / "build" / "python-path"
    if not path.exists() or path.read_text() != python:  # another target may read it
        path.write_text(python)


if __name__ == "__main__":
    main()
