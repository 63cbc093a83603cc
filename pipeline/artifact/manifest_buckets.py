"""What an artifact's manifest says of its shape buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relaxtune.models import TensorSpec
from relaxtune.models.buckets import Bucket, Side

if TYPE_CHECKING:
    from relaxtune.pipeline.artifact.manifest import KernelEntry


@dataclass(frozen=True)
class BucketEntry:
    """One shape that the artifact has code of its own for.

    Attributes
    ----------
    sizes
        Symbolic axis -> size.
    file
        Its shared object.
    inputs, outputs
        Its signature.
    weights
        Its parameters after the inputs, by their names in the artifact's weights, which all shapes share.
    kernels
        As the artifact's own.
    cuda_graph
        Whether it runs as a captured CUDA graph.
    planned_bytes
        Storage of its memory plan; None when it still has symbolic axes.
    """

    sizes: Mapping[str, int]
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[str, ...]
    kernels: tuple[KernelEntry, ...]
    cuda_graph: bool
    planned_bytes: int | None

    @property
    def bucket(self) -> Bucket:
        """Its sizes."""
        return Bucket(tuple(self.sizes.items()))


@dataclass(frozen=True)
class PaddingEntry:
    """Whether calls may be padded along an axis, and how that is known.

    Attributes
    ----------
    axis
        Its name.
    side
        Where padding goes; None where it is not allowed.
    cases
        Padded calls that were compared with ONNX Runtime's answer to the same call without padding.
    required_atol
        The smallest absolute tolerance that all of them would have passed with.
    reason
        Why padding is not allowed.
    """

    axis: str
    side: Side | None
    cases: int = 0
    required_atol: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class BucketsEntry:
    """All buckets of an artifact, the smallest first; `fills` is what padding of an input holds."""

    entries: tuple[BucketEntry, ...]
    fills: Mapping[str, float]
    padding: tuple[PaddingEntry, ...] = field(default=())

    @property
    def sides(self) -> dict[str, Side]:
        """The axes along which calls may be padded, with the side."""
        return {entry.axis: entry.side for entry in self.padding if entry.side is not None}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that buckets give sizes to."""
        return tuple(dict.fromkeys(axis for entry in self.entries for axis in entry.sizes))


def parse_padding(entries: list[dict[str, Any]]) -> tuple[PaddingEntry, ...]:
    """Return padding entries from plain JSON data."""
    return tuple(
        PaddingEntry(**{**entry, "side": Side(entry["side"]) if entry["side"] is not None else None})
        for entry in entries
    )
