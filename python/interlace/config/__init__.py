"""The settings of a run: Config, the forms of its values, and what a schedule says."""

from interlace.config.config import STRATEGIES, Config, format_bytes, parse_bytes
from interlace.config.forms import ConfigError, did_you_mean, dtype_name, mesh_form

__all__ = [
    "STRATEGIES", "Config", "ConfigError", "did_you_mean", "dtype_name", "format_bytes", "mesh_form", "parse_bytes",
]  # fmt: skip
