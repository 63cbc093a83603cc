"""`PrecisionPolicy`: what each kind of tensor is held in, and the policies that have a name.

A name alone says little ("fp16" with what accumulators? "4 bits" in groups of how many?), so a policy states weights,
activations, accumulators and norms apart, and its fields, not its name, go into manifests. The KV cache is recorded
beside it (`policy_entry`): inputs and outputs of a graph keep their dtypes under every policy.

============  ===================  ===================  ============  ================================================
name          weights              activations          accumulators  remarks
============  ===================  ===================  ============  ================================================
fp32          float32              float32              float32       the default of graphs in float32
tf32          tf32                 tf32                 float32       operands of matmuls rounded to 10 bits of mantissa
fp16          float16              float16              float32
bf16          bfloat16             bfloat16             float32
w8a16         uint8, scales fp16   float16              float32       offset 128, a scale for each group of a column
w4a16         uint4, scales fp16   float16              float32       offset 8, two in a byte, as above
int8          int8                 int8 or uint8        int32         of graphs that come quantised, as they come
int8          int8                 uint8                int32         of float graphs: scales a column and a row
fp8           float8_e4m3fn        float8_e4m3fn        float32       a scale a column and a row; the rest as fp16
============  ===================  ===================  ============  ================================================

"activations" are what matmuls and convolutions read; norms, softmax and elementwise chains compute in float32 in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.precision.calibration import StaticScales

if TYPE_CHECKING:
    from relaxtune.models import OnnxModel, TensorSpec

DEFAULT_GROUP_SIZE = 128
# The name where a graph's own dtypes stay and are not all float32.
AS_GIVEN = "as given"
FLOAT8 = "float8_e4m3fn"
# A group is read by whole 16-byte loads: 32 weights of 4 bits.
_GROUP_STEP = 32


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of tensors."""

    name: str  # As users give it.
    weights: str  # Of matmuls: a dtype, "tf32", or "int8", "uint8" and "uint4" for quantised ones.
    activations: str  # Operands of matmuls and convolutions.
    accumulators: str = "float32"  # Dtype of sums of products.
    norms: str = "float32"  # Dtype of norms and softmax.
    # Neighbouring weights along K that share a scale, 0 for all of a column; None where nothing is quantised.
    group_size: int | None = None
    scale_dtype: str | None = None  # Of the scales; None where nothing is quantised.

    @property
    def half(self) -> str | None:
        """The half-precision dtype that operands of matmuls are rounded to, None for none."""
        if self.float8:
            return "float16"
        return self.activations if self.activations in ("float16", "bfloat16") else None

    @property
    def float8(self) -> bool:
        """Whether matmuls multiply float8 where the target can, and 16 bits elsewhere."""
        return self.weights == FLOAT8

    @property
    def integer(self) -> bool:
        """Whether the matmuls of a graph that comes quantised are computed in integers."""
        return self.accumulators == "int32"

    def of_rows(self) -> PrecisionPolicy:
        """Return what int8 is of a float graph: uint8 activations, each row with a scale and a zero point."""
        return replace(self, activations="uint8", scale_dtype="float32")

    @property
    def weight_bits(self) -> int | None:
        """Bits of a weight that the policy quantises, None where it leaves weights as they come."""
        return {"uint8": 8, "uint4": 4}.get(self.weights)

    @property
    def quantises(self) -> bool:
        """Whether weights of a float graph are held in 8 or 4 bits."""
        return self.float8 or self.weight_bits is not None


@dataclass(frozen=True)
class PolicyEntry:
    """Dtypes of an artifact's tensors."""

    name: str  # Of the policy; `AS_GIVEN` for a graph that is not in float32 and was compiled as it is.
    # These and the group size and dtype of scales below are `PrecisionPolicy`'s.
    weights: str
    activations: str
    accumulators: str
    norms: str
    kv_cache: str  # Of the inputs that hold keys and values of tokens before; "none" where there are none.
    group_size: int | None = None
    scale_dtype: str | None = None
    # Names of the ONNX matmuls whose weights are quantised; other weights are held as activations are. Under int8: of
    # those computed in integers.
    quantised_nodes: tuple[str, ...] = ()
    # Names of the ONNX matmuls that int8 has left in floats (of two activations, with scales along K, of 16 bits), or
    # fp8 in 16 bits; empty under other policies.
    float_nodes: tuple[str, ...] = ()
    float_reasons: Mapping[str, str] = field(default_factory=dict)  # Why, by their names, where a reason is known.
    # Under fp8, static scales by the ONNX tensor that a quantised matmul reads; others have a scale for each row.
    static: StaticScales | None = None

    @property
    def weight_bits(self) -> int | None:
        """Bits of a weight that the policy has quantised, None where weights are as they came."""
        return {"uint8": 8, "uint4": 4}.get(self.weights) if self.quantised_nodes else None

    @property
    def float8(self) -> bool:
        """Whether some matmuls multiply float8."""
        return self.weights == FLOAT8 and bool(self.quantised_nodes)

    @property
    def rows_to_bytes(self) -> bool:
        """Whether int8 has quantised a float graph."""
        return self.weights == "int8" and self.scale_dtype is not None

    @property
    def rewrites(self) -> bool:
        """Whether a reference computes with other weights, or other operands of matmuls, than the graph as given."""
        return self.weight_bits is not None or self.float8 or self.rows_to_bytes


_POLICIES = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("fp32", "float32", "float32"),
        PrecisionPolicy("tf32", "tf32", "tf32"),
        PrecisionPolicy("fp16", "float16", "float16"),
        PrecisionPolicy("bf16", "bfloat16", "bfloat16"),
        PrecisionPolicy("w8a16", "uint8", "float16", group_size=DEFAULT_GROUP_SIZE, scale_dtype="float16"),
        PrecisionPolicy("w4a16", "uint4", "float16", group_size=DEFAULT_GROUP_SIZE, scale_dtype="float16"),
        PrecisionPolicy("int8", "int8", "int8 or uint8", accumulators="int32"),
        PrecisionPolicy("fp8", FLOAT8, FLOAT8, scale_dtype="float32"),
    )
}
POLICY_NAMES = tuple(_POLICIES)


def named_policy(name: str, group_size: int | None = None) -> PrecisionPolicy:
    """Return a policy by name.

    `name`: one of `POLICY_NAMES`. `group_size`: weights along K with one scale, a multiple of 32, or 0 for one scale a
    column; None for the policy's own. Only for policies that quantise.
    Raises `UsageError`: the name is unknown, or the group size is not one of that policy.
    """
    policy = _POLICIES.get(name)
    if policy is None:
        raise UsageError(
            f"unknown precision {name!r}; expected {', '.join(POLICY_NAMES)}, or none to keep the model's own dtypes"
        )
    if group_size is None:
        return policy
    if policy.group_size is None:
        quantising = ", ".join(one.name for one in _POLICIES.values() if one.group_size is not None)
        raise UsageError(f"precision {name!r} has no groups of weights; a group size is for {quantising}")
    if group_size < 0 or group_size % _GROUP_STEP:
        raise UsageError(f"group size {group_size}; expected a multiple of {_GROUP_STEP}, or 0 for one scale a column")
    return replace(policy, group_size=group_size)


def policy_entry(
    policy: PrecisionPolicy | None,
    model: OnnxModel,
    weights: Mapping[str, np.ndarray],
    quantised_nodes: tuple[str, ...],
    graph_dtype: str,
    float_nodes: tuple[str, ...] = (),
    float_reasons: Mapping[str, str] | None = None,
    static: StaticScales | None = None,
) -> PolicyEntry:
    """Return the entry of a lowered model.

    `policy`: as the request has it. `weights`: the weights as they are stored, for a graph that was compiled as it is.
    `graph_dtype`: the dtype in which the graph as given computes. `float_nodes`, `static`: see
    `PolicyEntry`.
    """
    cache = ", ".join(sorted({spec.dtype for spec in _caches(model)})) or "none"
    reasons = dict(float_reasons or {})
    # Without a matmul in integers (the pass is switched off) the graph is compiled as given.
    if policy is not None and policy.float8 and not quantised_nodes:
        half = str(policy.half)
        return PolicyEntry(
            policy.name,
            half,
            half,
            policy.accumulators,
            policy.norms,
            cache,
            float_nodes=float_nodes,
            float_reasons=reasons,
        )
    if policy is not None and (quantised_nodes or not policy.integer):
        return PolicyEntry(
            policy.name, policy.weights, policy.activations, policy.accumulators, policy.norms, cache,
            policy.group_size, policy.scale_dtype, quantised_nodes, float_nodes, reasons, static,
        )  # fmt: skip
    stored = _largest_dtype(weights) or graph_dtype
    name = "fp32" if (stored, graph_dtype) == ("float32", "float32") else AS_GIVEN
    accumulators = "float64" if graph_dtype == "float64" else "float32"
    norms = graph_dtype if graph_dtype in ("float32", "float64") else "float32"
    return PolicyEntry(name, stored, graph_dtype, accumulators, norms, cache)


def _caches(model: OnnxModel) -> list[TensorSpec]:
    # Imported here: an artifact is loaded without ONNX.
    from relaxtune.models.inputs import InputKind, describe_inputs

    kinds = {rule.name: rule.kind for rule in describe_inputs(model)}
    return [spec for spec in model.inputs if kinds[spec.name] is InputKind.CACHE]


def _largest_dtype(weights: Mapping[str, np.ndarray]) -> str | None:
    """Return the dtype of most of the bytes of matrices, None without any."""
    sizes: dict[str, int] = {}
    for array in weights.values():
        if array.ndim > 1:
            sizes[str(array.dtype)] = sizes.get(str(array.dtype), 0) + array.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
