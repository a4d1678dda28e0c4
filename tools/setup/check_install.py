"""Installs Interlace as a stranger would, in fresh environments, and says how long it took.

    python tools/setup/check_install.py                   # as a stranger does, every file compiled anew
    python tools/setup/check_install.py --shared          # in a minute: the torch, tools and objects of the environment that runs this
    python tools/setup/check_install.py --without-torch   # only 1

1. without torch: `pip install .` says what to do; INTERLACE_TORCH=OFF makes a wheel below 5 MB that plans, simulates and reports
2. with torch: `pip install .`, the README's example, `interlace doctor`
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_WHEEL = 5 << 20
TORCH = "torch==2.13.0"


def run(command: list[str | Path], folder: Path, fails: bool = False, **environment: str) -> str:
    """The output of a command that must succeed (or fail). Nothing of this checkout's environment reaches it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "INTERLACE_TORCH")}
    begin = time.monotonic()
    result = subprocess.run(
        [str(word) for word in command], cwd=folder, env={**kept, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    shown = " ".join(str(word) for word in command[1:6])
    if (result.returncode != 0) != fails:
        sys.exit(f"error: {shown} gave exit code {result.returncode}:\n{result.stdout[-4000:]}")
    print(f"» {time.monotonic() - begin:6.1f} s  {shown}", flush=True)
    return result.stdout


def expect(text: str, *parts: str) -> None:
    for part in parts:
        if part not in text:
            sys.exit(f"error: '{part}' is not in\n{text[-4000:]}")


def environment(folder: Path, name: str) -> Path:
    run([sys.executable, "-m", "venv", folder / name], folder)
    return folder / name / "bin"


def pip_install(bin: Path, *what: str, fails: bool = False, **settings: str) -> str:
    return run([bin / "python", "-m", "pip", "install", "--disable-pip-version-check", *what], bin.parent, fails, **settings)


def sees_this_environment(bin: Path) -> None:
    """The packages of the environment that runs this are those of another one, too."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (bin.parent / "lib" / version / "site-packages" / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


def without_torch(folder: Path, shared: bool) -> None:
    bin = environment(folder, "plain")
    apart = ("-C", f"build-dir={folder / 'build'}")  # ends before anything is compiled
    expect(pip_install(bin, *apart, str(ROOT), fails=True), "no torch in the environment", "INTERLACE_TORCH=OFF pip install .")
    wheel_of, options = bin, []
    if shared:
        wheel_of, options = environment(folder, "tools"), ["--no-build-isolation"]
        sees_this_environment(wheel_of)
    pip = [wheel_of / "python", "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", *options, "-w", folder, str(ROOT)]
    run(pip, folder, INTERLACE_TORCH="OFF")
    (wheel,) = folder.glob("interlace-*.whl")
    print(f"  {wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB")
    if wheel.stat().st_size > LARGEST_WHEEL:
        sys.exit(f"error: the wheel is larger than {LARGEST_WHEEL >> 20} MiB")
    pip_install(bin, str(wheel))
    command = bin / "interlace"
    expect(run([command, "doctor"], folder, fails=True), "pip install torch", "plan, simulate, report")
    layers = ROOT / "tests" / "models" / "llama.model"
    size = ["--global-batch", "16", "--seq", "64", "--dtype", "float32"]
    run([command, "plan", layers, "--cluster", "l4-24gb-2", *size, "-o", "found.plan"], folder)
    run([command, "report", "--plan", "found.plan", "-o", "plan.html"], folder)
    program = ROOT / "tests" / "golden" / "passes" / "mlp.il"
    run([command, "simulate", program, "--mesh", "dp=2", "--cluster", "h100-80gb-2", "--snapshot", "memory.pickle"], folder)
    expect(run([command, "--help"], folder), "doctor", "train")
    expect(run([command, "train"], folder, fails=True), "pip install torch")
    said = run([bin / "python", "-c", "import interlace; interlace.Config(); interlace.compile"], folder, fails=True)
    expect(said, "InterlaceError: interlace.compile: this needs torch")


def with_torch(folder: Path, shared: bool) -> None:
    bin = environment(folder, "torch")
    begin = time.monotonic()
    if shared:
        sees_this_environment(bin)
    else:
        pip_install(bin, TORCH)
    ready = time.monotonic()
    pip_install(bin, "--force-reinstall", *(["--no-deps", "--no-build-isolation"] if shared else []), str(ROOT))
    print(f"  torch {ready - begin:.0f} s, interlace {time.monotonic() - ready:.0f} s")
    example = re.search(r"^```python runnable\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert example is not None
    (folder / "example.py").write_text(example[1])
    run([bin / "python", "example.py"], folder)
    expect(run([bin / "python", "-m", "interlace.cli", "doctor"], folder), "runtime", "built with torch", str(bin.parent))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared", action="store_true", help="use what the environment that runs this has")
    parser.add_argument("--without-torch", action="store_true", help="only the first part")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="interlace-install-") as folder:
        without_torch(Path(folder), args.shared)
        if not args.without_torch:
            with_torch(Path(folder), args.shared)
    print("installs as documented")


if __name__ == "__main__":
    main()
