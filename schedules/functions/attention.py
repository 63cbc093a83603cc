"""The computation of an attention kernel: its specification, which PrimFuncs carry.

Notation
--------
::

    s[b, h, i, j] = scale * sum_d Q[b, h, i, d] * K[b, g, j, d] (+ bias[b, h, i, j])     d < head_dim
    p[b, h, i, j] = exp(s[b, h, i, j] - max_j s[b, h, i, j])
    O[b, h, i, d] = sum_j dtype(p[b, h, i, j]) * V[b, g, j, d] / sum_j p[b, h, i, j]     d < value_dim
    g = h // (heads / kv_heads)

All sums are float32; `dtype` is the dtype of V. Query i stands at position `i + keys - queries` among the keys. A key
that a query does not see (`causal`, `window`, a `keep` mask) has s = -inf. A row whose s are all -inf is NaN, as
ONNX's Softmax has it, or 0 (`guarded`); with a finite bias everywhere, however low, the softmax is an ordinary one.

The tensors lie anywhere in the parameters (`HeadLayout`: three slices of one packed QKV product, say). The pass that
recognises attention writes down where, as an `AttentionSpec` in the function's attribute `ATTENTION_ATTR`.

In a decode step K and V may be results too (`CacheGrowth`): caches of `past` positions, and new ones after them. The
plain PrimFunc that computes all that is made by `schedules.functions.plain_attention`; `attention_checks` has what a
specification must hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from tvm import tirx

from relaxtune.schedules.errors import ScheduleError
from relaxtune.schedules.marks import ATTENTION_ATTR
from relaxtune.schedules.sizes import Size, parse_size, size_text, variables_of

# Of a mask, what most have not.
_UNUSUAL = ("offset", "limit", "period")
# Shape and dtype of a parameter; or a scalar, a variable that is no axis of an input by itself.
Param: TypeAlias = "tuple[tuple[Size, ...], str] | tirx.Var"


class AttentionError(ScheduleError):
    """An attention whose tensors do not lie within the parameters as its specification says."""


@dataclass(frozen=True)
class HeadLayout:
    """Where element `[b, h, i, d]` of Q, K, V or O lies in a parameter: strides in elements, those of d being 1.

    `param` is the parameter's position among the PrimFunc's, `offset` the place of element [0, 0, 0, 0] in it; the
    strides are the distances of neighbours along b, i and h.
    """

    param: int
    offset: Size
    batch_stride: Size
    position_stride: Size
    head_stride: Size


@dataclass(frozen=True)
class ScoreBias:
    """A mask over the scores; a stride of 0 broadcasts.

    ::

        at = offset + query * query_stride + key * key_stride           (limit: no less than 0, and no more than that)
        bias[batch, head, query, key] = param[batch (modulo period) * batch_stride + head * head_stride + at]
    """

    param: int  # Position among the PrimFunc's parameters.
    # "add": added to the scaled scores. "keep": where it is 0 or false, the key is not seen.
    kind: Literal["add", "keep"]
    # In elements. With a limit, the strides of query and key are numbers, and may be negative: a bias of distances is
    # a table, along whose diagonals it lies.
    batch_stride: Size
    head_stride: Size
    query_stride: Size
    key_stride: Size
    offset: Size = 0  # Element [0, 0, 0, 0] of the mask in the parameter.
    limit: int = 0  # The last element of a row of the parameter that is read; 0 where no place lies outside.
    period: int = 0  # After how many batch elements the mask repeats, 0 for never: windows of an image, say.

    @property
    def of_padding(self) -> bool:
        """Whether all heads and queries have the same mask, one element a key."""
        strides = (self.query_stride, self.head_stride, self.key_stride)
        known = all(isinstance(number, int) for number in (*strides, self.offset))
        return known and strides == (0, 0, 1) and not (self.offset or self.limit or self.period)

    def row(self, batch: tirx.Expr, head: tirx.Expr) -> tirx.Expr:
        """Return where the part of a batch element and a head begins, from which `place` counts."""
        batch = tirx.floormod(batch, self.period) if self.period else batch
        return batch * self.batch_stride + head * self.head_stride

    def place(self, query: tirx.Expr, key: tirx.Expr) -> tirx.Expr:
        """Return the place of a query and a key, without regard to the limit."""
        return self.offset + query * self.query_stride + key * self.key_stride


@dataclass(frozen=True)
class CacheGrowth:
    """K and V, which the function writes besides O: `past` positions of caches, then new ones.

    The caches lie in `past_key` and `past_value`; the positions after them come from `new_key` and `new_value`.
    """

    past: Size
    past_key: HeadLayout
    past_value: HeadLayout
    new_key: HeadLayout
    new_value: HeadLayout


@dataclass(frozen=True)
class AttentionSpec:
    """An attention.

    Batch, queries, keys and strides may be symbolic: expressions of the variables in the function's shapes.
    """

    # Sizes; `heads` is a multiple of `kv_heads`. Q and K are `head_dim` wide, V and O `value_dim`.
    batch: Size
    heads: int
    kv_heads: int
    queries: Size
    keys: Size
    head_dim: int
    value_dim: int
    scale: float  # Factor of the products.
    causal: bool  # Whether query i sees only keys `j <= i + keys - queries`.
    window: int  # Query i sees only keys less than this far from position `i + keys - queries`; 0 for all.
    # Where the tensors lie.
    query: HeadLayout
    key: HeadLayout
    value: HeadLayout
    output: HeadLayout
    bias: ScoreBias | None = None  # The mask, if there is one.
    # What K and V, then the last two parameters, are made of; None where they are inputs.
    growth: CacheGrowth | None = None
    # Position of a parameter, int32 [queries, 2]: the first key that a query sees, and the one after the last. Both
    # grow with the query, and no span is empty. Sequences of several lengths are one batch element so.
    spans: int | None = None
    guarded: bool = False  # Whether a row whose s are all -inf is 0 (`where(isnan(p), 0, p)` in a graph).

    @property
    def outputs(self) -> int:
        """Parameters, the last ones, that the function writes."""
        return 1 if self.growth is None else 3

    @property
    def hides_earlier(self) -> bool:
        """Whether a query may not see a key before one that it sees."""
        return self.window > 0 or self.spans is not None

    @property
    def group(self) -> int:
        """Heads that share a head of K and V."""
        return self.heads // self.kv_heads

    def layouts(self) -> dict[str, HeadLayout]:
        """Return where each tensor lies, by its role."""
        layouts = {"query": self.query, "key": self.key, "value": self.value, "output": self.output}
        if self.growth is not None:
            layouts |= {"past key": self.growth.past_key, "past value": self.growth.past_value}
            layouts |= {"new key": self.growth.new_key, "new value": self.growth.new_value}
        return layouts

    @cached_property
    def is_static(self) -> bool:
        """Whether all sizes and strides are numbers."""
        return not any(isinstance(value, tirx.Expr) for value in _values(self))

    @property
    def variables(self) -> dict[str, tirx.Var]:
        """The variables in sizes and strides, by name."""
        return variables_of([[value for value in _values(self) if isinstance(value, tirx.Expr)]])

    def heads_of(self, role: str) -> int:
        """Return the heads of the tensor of a role."""
        return self.heads if role in ("query", "output") else self.kv_heads

    def positions(self, role: str) -> Size:
        """Return the positions of the tensor of a role."""
        if role in ("query", "output"):
            return self.queries
        if self.growth is None or role in ("key", "value"):
            return self.keys
        return self.growth.past if role.startswith("past") else self.keys - self.growth.past

    def width(self, role: str) -> int:
        """Return the width of the tensor of a role."""
        return self.value_dim if role == "output" or role.endswith("value") else self.head_dim

    def fields(self) -> dict[str, Any]:
        """Return all fields as JSON values, a symbolic size as text.

        Usual values are left out, as in older texts: a `value_dim` that is the `head_dim`, no spans, no guard, a
        mask that begins at the first element.

        Raises `ValueError`: a size is no sum, product or quotient of axes.
        """
        fields: dict[str, Any] = _document(self)
        if self.value_dim == self.head_dim:
            del fields["value_dim"]
        if self.spans is None:
            del fields["spans"]
        if not self.guarded:
            del fields["guarded"]
        if self.bias is not None:
            fields["bias"] = {name: value for name, value in fields["bias"].items() if value or name not in _UNUSUAL}
        return fields

    def to_json(self) -> str:
        """Return canonical JSON text, see `fields`."""
        document = self.fields()
        if self.growth is None:
            del document["growth"]
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, variables: Mapping[str, tirx.Var] | None = None) -> AttentionSpec:
        """Return the specification that `to_json` wrote, its symbolic sizes over the given variables.

        Raises `AttentionError`: the text is none, or names another variable.
        """
        try:
            document = _with_sizes(json.loads(text), variables or {})
            layouts = {role: HeadLayout(**document[role]) for role in ("query", "key", "value", "output")}
            bias = ScoreBias(**document["bias"]) if document["bias"] is not None else None
            growth = None
            if "growth" in document:
                roles = document.pop("growth")
                past = roles.pop("past")
                growth = CacheGrowth(past, **{role: HeadLayout(**layout) for role, layout in roles.items()})
            document.setdefault("value_dim", document["head_dim"])
            return cls(**{**document, **layouts, "bias": bias, "growth": growth})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError, SyntaxError) as error:
            raise AttentionError(f"{text!r} is no attention specification of this version ({error!r}).") from error


def _values(part: object) -> list[object]:
    """Return the values of a specification, those of its parts too."""
    if not is_dataclass(part):
        return [part]
    return [value for field in fields(part) for value in _values(getattr(part, field.name))]


def _document(part: object) -> Any:
    if is_dataclass(part):
        return {field.name: _document(getattr(part, field.name)) for field in fields(part)}
    return size_text(part) if isinstance(part, tirx.Expr) else part


def _with_sizes(document: dict[str, Any], variables: Mapping[str, tirx.Var]) -> dict[str, Any]:
    """Return the values of a document with sizes in the place of texts."""

    def value(name: str, given: Any) -> Any:
        if isinstance(given, dict):
            return _with_sizes(given, variables)
        return parse_size(given, variables) if isinstance(given, str) and name != "kind" else given

    return {name: value(name, given) for name, given in document.items()}


def spec_of(func: tirx.PrimFunc) -> AttentionSpec | None:
    """Return the attention that a PrimFunc computes, or None when it is not marked as one.

    Raises `AttentionError`: the mark cannot be read.
    """
    text = func.attrs.get(ATTENTION_ATTR) if func.attrs else None
    if text is None:
        return None
    variables = variables_of(getattr(param.ty, "shape", None) or (param,) for param in func.params)
    return AttentionSpec.from_json(str(text), variables)


def shapes_of(params: Sequence[Param]) -> list[tuple[Size, ...]]:
    """Return the shapes of parameters; a scalar is its own."""
    return [(param,) if isinstance(param, tirx.Var) else param[0] for param in params]


def scalars_of(inputs: Sequence[Param], result: tuple[Size, ...]) -> list[tirx.Var]:
    """Return the variables that an attention's inputs and result need as scalar parameters, after the inputs."""
    shapes = shapes_of(inputs)
    axes = [size for shape in shapes for size in shape if isinstance(size, tirx.Var)]
    variables = variables_of([*shapes, result]).values()
    return [var for var in variables if not any(var.same_as(axis) for axis in axes)]
