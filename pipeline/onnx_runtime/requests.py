"""Requests to the process of ONNX Runtime, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from relaxtune.pipeline.onnx_runtime.shared_arrays import ArraysPlace

CPU = "CPUExecutionProvider"


class Level(StrEnum):
    """How far a graph is optimised, by ONNX Runtime's names."""

    NONE = "ORT_DISABLE_ALL"
    BASIC = "ORT_ENABLE_BASIC"
    ALL = "ORT_ENABLE_ALL"


@dataclass(frozen=True)
class Settings:
    """The settings of a session."""

    level: Level  # How far its graph is optimised.
    threads: int | None = None  # On the CPU; None leaves it to ONNX Runtime.
    entries: tuple[tuple[str, str], ...] = ()  # Keys and values of its configuration.
    provider: str = CPU  # The execution provider.


@dataclass(frozen=True)
class Describe:
    """Asks for a `Description`."""


@dataclass(frozen=True)
class Description:
    """ONNX Runtime's version, and the providers it was built with."""

    version: str
    providers: tuple[str, ...]


@dataclass(frozen=True)
class Open:
    """Asks for a session; answered by the providers that it has."""

    session: int  # Its number.
    graph: bytes  # A ModelProto whose large weights are elsewhere.
    weights_key: int  # The number of these weights: sessions with the same one share them.
    weights: ArraysPlace  # Where they lie.
    settings: Settings  # Settings of the session.


@dataclass(frozen=True)
class Close:
    """Lets sessions go."""

    sessions: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Asks for outputs; answered by the `ArraysPlace` of arrays that lie there until the next request."""

    session: int
    names: tuple[str, ...]
    feeds: ArraysPlace


@dataclass(frozen=True)
class Prepare:
    """Gives inputs for calls to come, where the session computes; they are run once.

    `place` tells the calls of a session apart; a later one takes the place of an earlier one.
    """

    session: int
    names: tuple[str, ...]
    feeds: ArraysPlace
    place: int


@dataclass(frozen=True)
class Time:
    """Asks for the milliseconds of one call on what was prepared."""

    session: int
    place: int


@dataclass(frozen=True)
class Refused:
    """ONNX Runtime does not load a graph, or does not compute it on these inputs; `reason` is what it says."""

    reason: str


Request = Describe | Open | Close | Run | Prepare | Time
