"""Ranges of activations, found once from samples: the record that `calibrate` writes, and the scales that it gives."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxtune.pipeline.errors import UsageError

if TYPE_CHECKING:
    from relaxtune.models import OnnxModel

_FORMAT = "relaxtune calibration 1"
# The largest number of float8 e4m3; `schedules.functions.float8` would load TVM here.
_FLOAT8_MAX = 448.0


class Method(StrEnum):
    """How the limit of a tensor follows from the sizes of its elements."""

    MAX = "max"  # The largest.
    PERCENTILE = "percentile"  # Exceeded by 0.01 % of the elements.
    MSE = "mse"  # With the least squared error in float8.
    ENTROPY = "entropy"  # With the least divergence of the distribution in float8 from the exact one.


@dataclass(frozen=True)
class TensorRange:
    """The sizes of a tensor's elements over all samples."""

    limit: float  # Size that the largest number of the 8-bit format stands for; larger elements are clipped.
    largest: float  # Largest size of an element.
    outliers: float  # Share of the elements that are clipped.


@dataclass(frozen=True)
class StaticScales:
    """Scales of activations that calls do not compute."""

    record: str  # The sha256 of the record.
    graph: str  # `graph_key` of the model.
    scales: Mapping[str, float] = field(default_factory=dict)  # By ONNX tensor: what 1 in float8 stands for.

    def require_graph(self, model: OnnxModel) -> None:
        """Raise `UsageError` where the record is of another graph."""
        if self.graph != (key := graph_key(model)):
            raise UsageError(
                f"the calibration record is of graph {self.graph[:12]}, and model {model.name!r} is graph {key[:12]}: "
                "its nodes or weights differ; run `relaxtune calibrate` on this model again"
            )


@dataclass(frozen=True)
class CalibrationRecord:
    """The ranges of the tensors that a model's matmuls read."""

    graph: str  # `graph_key` of the model.
    data: str  # The sha256 of all samples.
    method: str
    samples: int
    ranges: Mapping[str, TensorRange]  # By ONNX tensor.

    @property
    def key(self) -> str:
        """The sha256 of the record's canonical JSON."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def scales(self) -> StaticScales:
        """Return the scales that the ranges give; a tensor of zeros has none."""
        found = {name: one.limit / _FLOAT8_MAX for name, one in sorted(self.ranges.items()) if one.limit > 0}
        return StaticScales(self.key, self.graph, found)

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        from relaxtune.pipeline.output_file import output_file  # An artifact is loaded without it.

        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True)
        with output_file(path, "--out") as file:
            file.write(f"{text}\n".encode())

    @staticmethod
    def read(path: Path) -> CalibrationRecord:
        """Return the record in a file.

        Raises `UsageError`: the file has none.
        """
        try:
            return _record_of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--calibration {path} is no calibration record ({error}); `relaxtune calibrate MODEL --data ... "
                f"--out {path}` writes one"
            ) from error


def _record_of(data: dict[str, Any]) -> CalibrationRecord:
    if (found := data.pop("format", None)) != _FORMAT:
        raise ValueError(f"its format is {found!r}, expected {_FORMAT!r}")
    ranges = {name: TensorRange(**one) for name, one in data.pop("ranges").items()}
    if not all(math.isfinite(one.limit) and one.limit >= 0 for one in ranges.values()):
        raise ValueError("a range is negative or not finite")
    return CalibrationRecord(**data, ranges=ranges)


def graph_key(model: OnnxModel) -> str:
    """Return the sha256 of a model's nodes and float weights, whatever sizes its axes are pinned to.

    Integer constants are left out: exporters and the zoo write sizes as such.
    """
    digest = hashlib.sha256()
    for node in model.proto.graph.node:
        digest.update(f"\0{node.op_type}\0{list(node.input)}\0{list(node.output)}".encode())
    for tensor in sorted(model.proto.graph.initializer, key=lambda one: str(one.name)):
        array = model.array(tensor.name)
        if array.dtype.kind not in "iub":
            digest.update(f"\0{tensor.name}\0{array.dtype}\0{array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
