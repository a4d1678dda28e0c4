"""Models to train, to capture and to plan for, by name or config.json."""

from interlace.models.builder import Built, build, hf_loss, import_class, on_meta
from interlace.models.lookup import config_of, resolve
from interlace.models.presets import PRESETS, Preset

__all__ = ["PRESETS", "Built", "Preset", "build", "config_of", "hf_loss", "import_class", "on_meta", "resolve"]
