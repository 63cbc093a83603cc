"""`LoweredModule`: what the passes hand to task extraction and to compilation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tvm

from relaxtune.models.dims import evaluate_dim
from relaxtune.models.unpadding import EXTRA_INPUTS, TOKENS, Unpadding
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.precision.calibration import StaticScales
from relaxtune.pipeline.precision.policy import PrecisionPolicy, named_policy


@dataclass(frozen=True)
class LoweringOptions:
    """Options of the passes."""

    # Name of a policy of `pipeline.precision`; None keeps the graph's own dtypes.
    precision: str | None = None
    disabled_passes: frozenset[str] = frozenset()  # Names; an unknown one is a `UsageError` that lists all.
    dump_dir: Path | None = None  # Where to write the IR after each phase (`NN-phase.py`).
    # True leaves the weights as constants of the module; False turns those of `weight_bytes_min` bytes or more into
    # parameters of `main` after the inputs, returned in `LoweredModule.weights`.
    embed_weights: bool = False
    weight_bytes_min: int = 16
    group_size: int | None = None  # Of quantised weights; None for the policy's own.
    calibration: StaticScales | None = None  # Of activations under fp8; None finds a scale for each row in each call.
    # Pass -> rows of a matmul up to which it acts, in place of the pass's own limit.
    rows_max: Mapping[str, int] = field(default_factory=dict)
    # Decision of `pipeline.passes.graph_decisions` that is part of these options -> the reason for it.
    decided: Mapping[str, str] = field(default_factory=dict)
    # Symbolic axis -> its largest size: memory is planned for it. A call with more is refused.
    maxima: Mapping[str, int] = field(default_factory=dict)
    unpad: bool = False  # Whether padding is left out (`pipeline.passes.tokens.unpad`).
    # Whether a CPU's weights are packed as for any number of rows: the modules of one artifact then share them.
    one_packing: bool = False

    @property
    def policy(self) -> PrecisionPolicy | None:
        """The policy asked for, None where the graph's own dtypes stay.

        Raises `UsageError`: there is none of this name, or not with this group size or calibration.
        """
        if self.calibration is not None and self.precision != "fp8":
            raise UsageError(
                f"a calibration record with precision {self.precision or 'none'}: only fp8 has static scales; add "
                "--precision fp8, or leave --calibration out"
            )
        if self.precision is None:
            if self.group_size is not None:
                raise UsageError("a group size without a precision; name one that quantises, such as w4a16")
            return None
        return named_policy(self.precision, self.group_size)


@dataclass(frozen=True)
class PassReport:
    """The effect of one pass: Relax bindings removed (negative when it added some), constants folded, seconds.

    `failure` is why the pass was left out, "" where it was not; a pass left out is not `enabled`.
    """

    phase: str
    name: str
    enabled: bool
    seconds: float
    bindings_removed: int
    constants_folded: int
    notes: tuple[str, ...] = ()
    failure: str = ""
    changed: bool = True  # Whether the module is another one behind it; known of passes that decisions are about.


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel in `main`: the variable it binds and the ONNX nodes it computes."""

    binding: str
    onnx_nodes: tuple[str, ...]


@dataclass(frozen=True)
class LoweredModule:
    """A Relax `main` over unscheduled PrimFuncs, one PrimFunc per fused kernel (the state after FuseTIR)."""

    graph: ImportedGraph  # The signature, the source's hash, the original ONNX model.
    mod: tvm.ir.IRModule  # `main(inputs..., weights...)` calls the PrimFuncs by `call_tir`.
    target: tvm.target.Target
    options: LoweringOptions
    # Weight parameter name -> array, in the order of `main`'s trailing parameters. Empty when embedded.
    weights: Mapping[str, np.ndarray]
    kernels: Mapping[str, tuple[KernelCall, ...]]  # PrimFunc name -> its calls in `main`, in execution order.
    reports: tuple[PassReport, ...] = field(default=())  # One entry per pass, in order, disabled ones included.
    # Names of the ONNX matmuls whose weights were quantised; under precision int8, of those computed in integers.
    quantised_nodes: tuple[str, ...] = ()
    float_nodes: tuple[str, ...] = ()  # Names of the ONNX matmuls that precision int8 has left in floats.
    float_reasons: Mapping[str, str] = field(default_factory=dict)  # Why, by their names, where a reason is known.
    static: StaticScales | None = None  # Scales of the activations that have static ones.
    rows_to_bytes: bool = (
        False  # Whether int8 has quantised a graph of floats, its activations row by row in each call.
    )
    unpadding: Unpadding | None = None  # `main` then has more inputs than the graph.

    @property
    def input_count(self) -> int:
        """How many of the parameters of `main` are inputs; the others are weights."""
        return len(self.graph.inputs) + (0 if self.unpadding is None else EXTRA_INPUTS)

    @property
    def maxima(self) -> Mapping[str, int]:
        """The largest sizes that memory is planned for, by symbolic axis."""
        return self.with_tokens(self.options.maxima)

    def with_tokens(self, known: Mapping[str, int]) -> Mapping[str, int]:
        """Return sizes of axes and of the tokens' axis: as many tokens as places, no padding."""
        if self.unpadding is None:
            return known
        (mask,) = (spec for spec in self.graph.inputs if spec.name == self.unpadding.mask)
        sizes = [evaluate_dim(size, known) for size in mask.shape]
        whole = [size for size in sizes if isinstance(size, int)]
        return {**known, TOKENS: math.prod(whole)} if len(whole) == len(sizes) else known
