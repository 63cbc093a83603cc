"""The meaning of a kernel, read from its TIR blocks: operator family, sizes, dtypes and epilogue, as canonical JSON.

Two PrimFuncs of one signature compute the same function of their parameters, whatever TVM version wrote the IR; that
makes the signature the key under which template and library parameters are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import tirx

from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.marks import TF32_ATTR
from relaxtune.schedules.tir.blocks import Block, list_blocks, static_shape, written_params
from relaxtune.schedules.tir.contraction import Contraction, find_contraction
from relaxtune.schedules.tir.expressions import call_names, list_loads

_OPERATORS = {
    "Add": "add", "Sub": "subtract", "Mul": "multiply", "Div": "divide", "Max": "maximum", "Min": "minimum",
    "FloorDiv": "floor_divide", "FloorMod": "floor_mod", "Select": "select", "EQ": "equal", "NE": "not_equal",
    "LT": "less", "LE": "less_equal", "GT": "greater", "GE": "greater_equal", "And": "and", "Or": "or", "Not": "not",
}  # fmt: skip


@dataclass(frozen=True)
class KernelMeaning:
    """The family of a kernel and its signature as canonical JSON text."""

    family: str
    signature: str


def describe_kernel(func: tirx.PrimFunc) -> KernelMeaning:
    """Return the family and signature of a PrimFunc of static shapes.

    A function that is marked as an attention is described by its specification, not by the blocks that define it.
    """
    attention = spec_of(func)
    if attention is not None:
        return _described(func, "attention", {"attention": attention.fields()})
    blocks = list_blocks(func)
    names = _canonical_names(func, blocks)
    contractions = [(position, c) for position, block in enumerate(blocks) if (c := find_contraction(block))]
    if len(contractions) == 1:
        position, contraction = contractions[0]
        body = _contraction_fields(blocks, position, contraction, func, names)
        family = "conv" if contraction.is_conv else "batch_matmul" if contraction.batch > 1 else "matmul"
    else:
        body = {"ops": [_block_fields(block, names) for block in blocks]}
        family = "attention" if len(contractions) > 1 and _is_softmax(blocks) else _family(func, blocks, contractions)
    return _described(func, family, body)


def _described(func: tirx.PrimFunc, family: str, fields: Mapping[str, object]) -> KernelMeaning:
    outputs = set(written_params(func))
    body = dict(fields)
    body["inputs"] = [_param(p) for i, p in enumerate(func.params) if i not in outputs]
    body["outputs"] = [_param(func.params[i]) for i in sorted(outputs)]
    if func.attrs and func.attrs.get(TF32_ATTR, False):
        body["tf32"] = True
    signature = json.dumps({"family": family, **body}, sort_keys=True, separators=(",", ":"))
    return KernelMeaning(family, signature)


def _family(func: tirx.PrimFunc, blocks: list[Block], contractions: list[tuple[int, Contraction]]) -> str:
    if contractions:
        return "multi_matmul"
    if _is_softmax(blocks):
        return "softmax"
    reduces = any(block.reduced for block in blocks)
    stores = [store for block in blocks for store in block.stores]
    if reduces and any({"tirx.rsqrt", "tirx.sqrt"} & call_names(store.value) for store in stores):
        return "norm"
    if reduces:
        return "reduction"
    if any(list_loads(index) for store in stores for load in list_loads(store.value) for index in load.indices):
        return "gather"
    if any(list_loads(index) for store in stores for index in store.indices):
        return "scatter"
    if stores and all(isinstance(store.value, tvm.ir.TensorLoad) for store in stores):
        return "layout"
    return "elementwise"


def _is_softmax(blocks: list[Block]) -> bool:
    values = [(block, store.value) for block in blocks for store in block.stores]
    has_max = any(block.reduced and isinstance(value, tirx.Max) for block, value in values)
    has_sum = any(block.reduced and isinstance(value, tirx.Add) for block, value in values)
    return has_max and has_sum and any({"tirx.exp", "tirx.exp2"} & call_names(value) for _, value in values)


def _contraction_fields(
    blocks: list[Block], position: int, contraction: Contraction, func: tirx.PrimFunc, names: dict[tvm.ir.Var, str]
) -> dict[str, object]:
    output = func.params[written_params(func)[-1]]
    return {
        "batch": contraction.batch,
        "m": contraction.m,
        "n": contraction.n,
        "k": contraction.k,
        "trans_a": contraction.trans_a,
        "trans_b": contraction.trans_b,
        "a": [names[contraction.a], str(contraction.a.dtype)],
        "b": [names[contraction.b], str(contraction.b.dtype)],
        "acc_dtype": str(contraction.output.dtype),
        "out_dtype": str(output.dtype),
        "prologue": [_block_fields(block, names) for block in blocks[:position]],
        "epilogue": [_epilogue_fields(block, names) for block in blocks[position + 1 :]],
        # The sizes do not tell the order of the output's axes, nor a convolution's strides and padding; this does.
        "core": _block_fields(blocks[position], names),
    }


def _epilogue_fields(block: Block, names: dict[tvm.ir.Var, str]) -> dict[str, object]:
    """Return one step of an epilogue: its operator, its operands beside intermediates, and the exact expression."""
    store = block.stores[-1]
    size = math.prod(static_shape(store.buffer) or ())
    operands = []
    for load in list_loads(store.value):
        name = names[load.source]
        if name.startswith("p") and not load.source.same_as(store.buffer):
            shape = static_shape(load.source) or ()
            count = math.prod(shape)
            longest = max(shape, default=1)
            role = "residual" if count == size else "scalar" if count == 1 else "bias" if longest == count else "tensor"
            operands.append({"param": name, "role": role, "shape": list(shape), "dtype": str(load.source.dtype)})
    return {**_block_fields(block, names), "op": _operator(store.value), "operands": operands}


def _operator(value: tvm.ir.Expr) -> str:
    if isinstance(value, tvm.ir.TensorLoad):
        return "copy"
    if isinstance(value, tirx.Cast):
        inner = _operator(value.value)
        return f"cast:{value.ty}" if inner == "copy" else inner
    if isinstance(value, tvm.ir.Call) and isinstance(value.op, tvm.ir.Op):
        return str(value.op.name).rsplit(".", 1)[-1]
    return _OPERATORS.get(type(value).__name__, type(value).__name__.lower())


def _block_fields(block: Block, names: dict[tvm.ir.Var, str]) -> dict[str, object]:
    others = [var for var, kind in zip(block.axes, block.kinds, strict=True) if kind != "R"]
    axes = {var: f"i{n}" for n, var in enumerate(others)} | {var: f"r{n}" for n, var in enumerate(block.reduced)}
    known = {**names, **axes}
    return {
        "axes": [size for size, kind in zip(block.extents, block.kinds, strict=True) if kind != "R"],
        "reduce": list(block.reduced_sizes),
        "expr": [
            f"{names[s.buffer]}[{','.join(_text(i, known) for i in s.indices)}]={_text(s.value, known)}"
            for s in block.stores
        ],
    }


def _text(expr: tvm.ir.Expr, names: dict[tvm.ir.Var, str]) -> str:
    """Return an expression as text in which no name comes from the IR printer, so that it is stable over versions."""
    if isinstance(expr, tvm.ir.Var):
        return names.get(expr, "v")
    if isinstance(expr, tvm.ir.TensorLoad):
        return f"{names.get(expr.source, 'v')}[{','.join(_text(index, names) for index in expr.indices)}]"
    if isinstance(expr, tirx.IntImm):
        return str(int(expr.value))
    if isinstance(expr, tirx.FloatImm):
        return f"{float(expr.value):.9g}"
    if isinstance(expr, tirx.Cast):
        return f"cast_{expr.ty}({_text(expr.value, names)})"
    if isinstance(expr, tvm.ir.Call):
        arguments = expr.args
        name = _operator(expr) if isinstance(expr.op, tvm.ir.Op) else "call"
    else:
        fields = (getattr(expr, name, None) for name in ("condition", "a", "b", "value", "true_value", "false_value"))
        arguments = [child for child in fields if isinstance(child, tvm.ir.Expr)]
        name = _operator(expr)
    return f"{name}({','.join(_text(argument, names) for argument in arguments)})"


def _canonical_names(func: tirx.PrimFunc, blocks: list[Block]) -> dict[tvm.ir.Var, str]:
    """Return names of buffers and scalars by position: `p0`, `p1` for parameters, `t0`, `t1` for intermediates."""
    names: dict[tvm.ir.Var, str] = {param: f"p{position}" for position, param in enumerate(func.params)}
    for block in blocks:
        for store in block.stores:
            for load in list_loads(store.value):
                names.setdefault(load.source, f"t{len(names) - len(func.params)}")
            names.setdefault(store.buffer, f"t{len(names) - len(func.params)}")
    return names


def _param(param: tvm.ir.Var) -> list[object]:
    return [list(static_shape(param) or ()), str(param.dtype)]
