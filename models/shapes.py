"""Shape overrides: what they bind, how they reach a zoo preset, and how they are pinned in a user's graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import onnx

from relaxtune.models.dims import Dim, evaluate_dim, may_be_empty, split_offset
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.onnx_model import dtype_name, list_graphs
from relaxtune.models.spec import TensorSpec
from relaxtune.polynomials import read_size

Shapes = Mapping[str, Sequence[Dim]]


def signature_of(values: Sequence[onnx.ValueInfoProto], kind: str) -> tuple[TensorSpec, ...]:
    """Return the specs of graph inputs or outputs; an axis without a name gets `<tensor>_<axis>`."""
    specs = []
    for value in values:
        tensor = value.type.tensor_type
        specs.append(
            TensorSpec(value.name, dtype_name(tensor.elem_type, f"{kind} {value.name!r}"), _shape_of(value, kind))
        )
    return tuple(specs)


def _shape_of(value: onnx.ValueInfoProto, kind: str) -> tuple[Dim, ...]:
    shape: list[Dim] = []
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        # onnx makes up names of the axes of outputs, and has sizes in its own notation.
        made_up = kind == "output" and re.match(r"unk__\d|.*floor\(", dim.dim_param)
        name = "" if made_up else dim.dim_param
        shape.append(dim.dim_value if dim.HasField("dim_value") else name or f"{value.name}_{axis}")
    return tuple(shape)


def name_unknown_axes(graph: onnx.GraphProto) -> None:
    """Name the axes of a graph's inputs that a file gives no name, as `signature_of` does; no two of them are equal.

    ONNX Runtime takes a negative size for an unknown one, and Paddle's exporter writes -1 or `?`. Names that can stand
    in no size, such as `DynamicDimension.0`, get underscores.
    """
    named = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim}
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0 or dim.dim_param == "?":
                dim.Clear()
    renamed: dict[str, str] = {}
    for name in sorted(name for name in named if name and name != "?" and read_size(name) is None):
        renamed[name] = re.sub(r"\W|^(?=\d)", "_", name)
        while renamed[name] in named:
            renamed[name] += "_"
        named.add(renamed[name])
    for value in (*graph.input, *graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in renamed:
                dim.dim_param = renamed[dim.dim_param]
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = re.sub(r"\W|^(?=\d)", "_", f"{value.name}_{axis}")
                while dim.dim_param in named:
                    dim.dim_param += "_"
                named.add(dim.dim_param)


def bind_shapes(specs: Sequence[TensorSpec], shapes: Shapes, model: str) -> dict[str, Dim]:
    """Return what the overrides say of every symbolic dimension: a number, or another name.

    An override is of an input, or of an axis in all inputs: `{"sequence": (128,)}`; an input of that name goes first.

    Raises `ModelShapeError`: an unknown input, another rank, a static dimension given another number, or two overrides
    that disagree.
    """
    by_name = {spec.name: spec for spec in specs}
    bindings: dict[str, Dim] = {}
    said_by: dict[str, str] = {}
    symbols = {axis for spec in specs for axis in spec.shape if isinstance(axis, str) and axis.isidentifier()}
    for name, shape in shapes.items():
        if name in symbols - by_name.keys() and len(shape) == 1:
            first = next(spec for spec in specs if name in spec.shape)
            bound = _bind_axis(first, first.shape.index(name), name, shape[0])
            _bind(bindings, said_by, bound, f"axis {name!r}", model)
            continue
        if name not in by_name:
            raise ModelShapeError(
                f"model {model!r} has no input and no symbolic axis {name!r}; its inputs are "
                f"{'; '.join(str(spec) for spec in specs)}"
            )
        spec = by_name[name]
        if len(shape) != len(spec.shape):
            msg = f"shape of input {name!r} has {len(shape)} axes, expected {len(spec.shape)} as in {spec}"
            raise ModelShapeError(msg)
        for axis, (have, want) in enumerate(zip(spec.shape, shape, strict=True)):
            _bind(bindings, said_by, _bind_axis(spec, axis, have, want), f"input {name!r}", model)
    return bindings


def _bind(
    bindings: dict[str, Dim], said_by: dict[str, str], bound: tuple[str, Dim] | None, by: str, model: str
) -> None:
    if bound is None:
        return
    symbol, value = bound
    if bindings.setdefault(symbol, value) != value:
        raise ModelShapeError(
            f"dimension {symbol!r} of model {model!r} is {bindings[symbol]} by {said_by[symbol]} and {value} by {by}; "
            "give one value"
        )
    said_by.setdefault(symbol, by)


def _bind_axis(spec: TensorSpec, axis: int, have: Dim, want: Dim) -> tuple[str, Dim] | None:
    least = 0 if may_be_empty(len(spec.shape), axis) else 1
    if (
        isinstance(want, bool)
        or not isinstance(want, int | str)
        or (isinstance(want, int) and want < least)
        or want == ""
    ):
        raise ModelShapeError(f"axis {axis} of input {spec.name!r} is {want!r}; expected a positive number or a name")
    if isinstance(have, int):
        if have == want:
            return None
        msg = f"axis {axis} of input {spec.name!r} is static: expected {have} as in {spec}, got {want!r}"
        raise ModelShapeError(msg)
    offset = split_offset(have)
    if offset is None:
        return have, want
    if have == want:
        return None
    base, constant = offset
    if isinstance(want, str) or want - constant < 0:
        raise ModelShapeError(
            f"axis {axis} of input {spec.name!r} is {have!r}, got {want!r}; "
            f"expected a number of at least {constant}, or give {base!r} through the input that has it"
        )
    return base, want - constant


def pin_shapes(model: onnx.ModelProto, bindings: Mapping[str, Dim]) -> None:
    """Rewrite every symbolic dimension that `bindings` name, in inputs, outputs and value_info, subgraphs included.

    An expression over bound names (`past_sequence + 1`) becomes its number; the caller infers shapes afterwards.
    """
    numbers = {name: value for name, value in bindings.items() if isinstance(value, int)}
    for graph in list_graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                if dim.HasField("dim_value"):
                    continue
                symbol = dim.dim_param or f"{value.name}_{axis}"
                renamed = bindings.get(symbol)
                pinned = renamed if isinstance(renamed, str) else evaluate_dim(symbol, numbers)
                if isinstance(pinned, int):
                    dim.dim_value = pinned
                elif pinned != symbol:
                    dim.dim_param = pinned
