"""Transformer graphs built from presets with seeded weights; no framework needed."""

from __future__ import annotations

from relaxtune.models.zoo.graph import Precision
from relaxtune.models.zoo.presets import Preset, get_preset, list_models

__all__ = ["Precision", "Preset", "get_preset", "list_models"]
