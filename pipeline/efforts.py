"""How much a tuning run tries; `pipeline.tuning.effort` says what each level is made of. Imports nothing of TVM."""

from __future__ import annotations

from enum import StrEnum


class Effort(StrEnum):
    """The named levels, the README says what each costs."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"
