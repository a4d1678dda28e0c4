"""Models to train, to capture and to plan for, by name or config.json."""

from typing import TYPE_CHECKING, Any

from interlace.models.lookup import config_of, options_of, resolve
from interlace.models.presets import PRESETS, Preset

if TYPE_CHECKING:
    from interlace.models.builder import Built, build, hf_loss, import_class, on_meta

__all__ = ["PRESETS", "Built", "Preset", "build", "config_of", "hf_loss", "import_class", "on_meta", "options_of", "resolve"]


def __getattr__(name: str) -> Any:
    """What builds a model is imported when first used: names are looked up without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'interlace.models' has no attribute '{name}'")
    from interlace.models import builder

    return getattr(builder, name)
