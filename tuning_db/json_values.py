"""Frozen dataclasses from plain JSON data, checked against the types of their fields."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import TypeVar, cast

_Value = TypeVar("_Value")
_hints = cache(typing.get_type_hints)
_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "null",
    tuple: "a list",
    Mapping: "an object",
    datetime: "a time",
}


class JsonValueError(ValueError):
    """Data does not fit a type; the message begins with the place, such as `kernels.3.calls`."""

    def __init__(self, place: Sequence[object], what: str) -> None:
        super().__init__(f"{'.'.join(map(str, place)) or 'the whole'}: {what}")
        self.depth = len(place)


def read_value(kind: type[_Value], data: object) -> _Value:
    """Return plain JSON data as a value of a frozen dataclass.

    Its fields are of such dataclasses, also given as values; of `str`, `int`, `float`, `bool`, `object`, `datetime`; of
    an enum of texts; or tuples, mappings of texts, and unions of these. Keys that a dataclass does not have are left
    out: newer versions write more.

    Raises `JsonValueError`: a key is missing, or something is of another type.
    """
    return cast(_Value, _read(kind, data, ()))


def _read(kind: object, data: object, place: tuple[object, ...]) -> object:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        errors = []
        for one in inner:
            try:
                return _read(one, data, place)
            except JsonValueError as e:
                errors.append(e)
        # The kind that fitted deepest is the one that was meant.
        raise max(errors, key=lambda e: e.depth)
    if origin is tuple and isinstance(data, list):
        kinds = inner[:1] * len(data) if inner[1:] == (Ellipsis,) else inner
        if len(kinds) != len(data):
            raise JsonValueError(place, f"expected {len(kinds)} items, got {len(data)}")
        pairs = enumerate(zip(kinds, data, strict=True))
        return tuple(_read(one, item, (*place, number)) for number, (one, item) in pairs)
    if origin is Mapping and isinstance(data, dict):
        return {key: _read(inner[1], value, (*place, key)) for key, value in data.items()}
    if isinstance(kind, type):
        if is_dataclass(kind) and isinstance(data, dict):
            return _dataclass(kind, data, place)
        if issubclass(kind, enum.Enum) and data in [one.value for one in kind]:
            return kind(data)
        # A bool is no number here, as it is to `isinstance`.
        if kind is object or type(data) is kind:
            return data
        if kind is float and type(data) is int:
            return float(data)
        if kind is datetime and isinstance(data, str):
            return datetime.fromisoformat(data)
    expected = _NAMES.get(cast(type, origin or kind), "an object")
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        expected = f"one of {', '.join(str(one.value) for one in kind)}"
    raise JsonValueError(place, f"expected {expected}, got {_NAMES.get(type(data), type(data).__name__)}")


def _dataclass(kind: type, data: dict[str, object], place: tuple[object, ...]) -> object:
    hints = _hints(kind)
    given = {}
    for one in fields(kind):
        if one.name in data:
            given[one.name] = _read(hints[one.name], data[one.name], (*place, one.name))
        elif one.default is MISSING and one.default_factory is MISSING:
            raise JsonValueError((*place, one.name), "this key is missing")
    return kind(**given)
