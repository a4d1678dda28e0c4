"""The exceptions of the Python front. Every message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from pathlib import Path


class InterlaceError(Exception):
    """Base of every error that Interlace raises on purpose."""


# What Python makes of a value that a file should not hold.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError)


class CaptureError(InterlaceError):
    """The model, the loss function, the optimizer or the example batch cannot be turned into a program."""


def what_to_install(error: ImportError) -> str | None:
    """What is missing for an import that failed, and the command that installs it; None where it is nothing of this kind."""
    name = (error.name or "").partition(".")[0]
    if name == "torch" and not isinstance(error, ModuleNotFoundError):  # a part of it that it does not have
        import torch

        newer = REINSTALL.replace("install", "install -U", 1)
        return f"this needs torch {OLDEST_TORCH} or later, and this is torch {torch.__version__}:\n{newer}"
    if name == "torch":
        return "this needs torch, which is not installed here. Install it, then Interlace against it:\n" + REINSTALL
    if name == "transformers":
        return "this needs Hugging Face transformers, which is not installed here:\n  pip install 'transformers>=4.51'"
    if error.name == "interlace._runtime" or "_runtime" in str(error):
        built = built_with()
        if built is None:
            return "this Interlace was installed without its runtime, to plan, simulate and report. To train:\n" + REINSTALL
        return f"Interlace was built against torch {built}, and does not load beside the torch that is here. Build it again:\n{REBUILD}"
    return None


OLDEST_TORCH = "2.9"  # that the tests have run with
REINSTALL = "  pip install torch\n  pip install --force-reinstall --no-deps .    # in the source tree of Interlace"
REBUILD = "  pip install --force-reinstall --no-deps .    # in the source tree of Interlace"


def built_with() -> str | None:
    """The version of torch that the runtime was built against; None where the package has no runtime (or was not installed by pip)."""
    try:
        return (Path(__file__).parent / "built_with.txt").read_text().strip()
    except FileNotFoundError:
        return None
