"""Column types of the schema: times in UTC and enums as text, checked when a row is read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import DateTime, Dialect, String
from sqlalchemy.types import TypeDecorator, TypeEngine

T = TypeVar("T")


class NumberKind(StrEnum):
    """Why a number is, or is not, in its column."""

    FINITE = "finite"
    NONE = "none"
    NAN = "nan"
    INF = "inf"
    NEG_INF = "-inf"


class DamagedValueError(ValueError):
    """The content of a row is no value of its column."""


def read_as(convert: Callable[[Any], T], value: object) -> T:
    """Return `convert(value)` of a stored value.

    Raises `DamagedValueError`: it cannot be converted.
    """
    try:
        return convert(value)
    except (ValueError, TypeError, LookupError, RecursionError, zlib.error) as e:
        raise DamagedValueError(f"{type(e).__name__}: {e}") from e


class _CheckedWhenRead(TypeEngine[T]):
    """A column type whose converter raises `DamagedValueError` for what it cannot convert."""

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], T | None] | None:
        """Return the converter of stored values."""
        convert = super().result_processor(dialect, coltype)
        return None if convert is None else partial(read_as, convert)


class UtcDateTime(_CheckedWhenRead[datetime], TypeDecorator[datetime]):
    """An aware time in UTC; SQLite keeps no zone, so it is put back when read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return an aware time in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class TextEnum(_CheckedWhenRead[StrEnum], TypeDecorator[StrEnum]):
    """The values of `enum` as text, so that a new member needs no migration."""

    impl = String(16)
    cache_ok = True

    def __init__(self, enum: type[StrEnum]) -> None:
        super().__init__()
        self.enum = enum

    def process_bind_param(self, value: StrEnum | None, dialect: Dialect) -> str | None:
        """Return the text of a member."""
        return None if value is None else self.enum(value).value

    def process_result_value(self, value: str | None, dialect: Dialect) -> StrEnum | None:
        """Return the member."""
        return None if value is None else self.enum(value)
