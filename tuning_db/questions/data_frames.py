"""Answers as data frames, for those who have pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING

from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.records import TuningRecord

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


def flatten(value: object, prefix: str = "") -> dict[str, object]:
    """Return the fields of a value by dotted names; a record also has its median, as `latency_us`."""
    if isinstance(value, Mapping):
        found: dict[str, object] = {}
        for name, part in value.items():
            found |= flatten(part, f"{prefix}.{name}" if prefix else str(name))
        return found
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, TuningRecord):
            parts["latency_us"] = value.latency_us
        return flatten(parts, prefix)
    return {prefix: value.value if isinstance(value, Enum) else value}


def to_frame(values: Iterable[object]) -> pandas.DataFrame:
    """Return one row for each value: records, or what `queries` and `insights` answer.

    Raises `TuningDatabaseError`: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as e:
        raise TuningDatabaseError("Data frames need pandas, which is not installed. Run: pip install pandas") from e
    return pandas.DataFrame([flatten(value) for value in values])
