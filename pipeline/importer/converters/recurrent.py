"""LSTM, GRU and RNN: a matmul of all steps' inputs, then the steps (`schedules.functions.recurrence`)."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te

from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    constant_value,
    converts,
    dtype_of,
    sizes_of,
)
from relaxtune.schedules.functions.recurrence import Recurrence, recurrence_function

_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@converts("LSTM")
def convert_lstm(node: ConverterInput) -> tvm.ir.Expr:
    """Return Y, Y_h and Y_c of inputs X, W, R, B, sequence_lens, initial_h, initial_c; no peepholes."""
    peepholes = node.optional(7)
    if node.integer("input_forget", 0) or (peepholes is not None and not _is_zero(peepholes)):
        raise ValueError("expected an LSTM without peepholes and with a forget gate of its own")
    return _layer(node, "LSTM")


@converts("GRU")
def convert_gru(node: ConverterInput) -> tvm.ir.Expr:
    """Return Y and Y_h of inputs X, W, R, B, sequence_lens, initial_h; the reset gate is applied behind the matmul."""
    if not node.integer("linear_before_reset", 0):
        raise ValueError("attribute 'linear_before_reset': expected 1, as PyTorch exports it, got 0")
    return _layer(node, "GRU")


@converts("RNN")
def convert_rnn(node: ConverterInput) -> tvm.ir.Expr:
    """Return Y and Y_h of inputs X, W, R, B, sequence_lens, initial_h."""
    return _layer(node, "RNN")


def _layer(node: ConverterInput, kind: str) -> tvm.ir.Expr:
    weights = [constant_value(node.optional(place)) for place in (1, 2, 3)]
    if weights[0] is None or weights[1] is None or (weights[2] is None and node.optional(3) is not None):
        raise ValueError("inputs 1 to 3 (W, R, B): expected constants, got values known at run time only")
    if node.integer("layout", 0):
        raise ValueError("attribute 'layout': expected 0, the steps first, got 1")
    if dtype_of(node.input(0)) != "float32":
        raise ValueError(f"input 0 (X): expected float32, got {dtype_of(node.input(0))}")
    hidden = int(weights[1].shape[2])
    layer = Recurrence(kind, hidden, _directions(node), _is_rectified(node, kind))
    directions, gates, columns = len(layer.reversed), layer.gates, layer.gates * layer.lanes
    both = np.zeros((directions, 2, gates, hidden), "float32") if weights[2] is None else weights[2]
    both = both.reshape(directions, 2, gates, hidden)
    bias, inner = both.sum(1), np.zeros_like(both[:, 1])
    if kind == "GRU":
        bias[:, 2], inner[:, 2] = both[:, 0, 2], both[:, 1, 2]

    def tiled(array: np.ndarray) -> np.ndarray:
        """Return (D, G, H, ...) as (D, H / L, G * L, ...)."""
        parts = array.reshape(directions, gates, layer.tiles, layer.lanes, *array.shape[3:])
        return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(directions, layer.tiles, columns, *array.shape[3:]))

    of_input = tiled(weights[0].reshape(directions, gates, hidden, -1))
    of_state = tiled(weights[1].reshape(directions, gates, hidden, hidden)).swapaxes(2, 3)
    emit, data = node.builder.emit, node.input(0)
    matrix = constant(np.ascontiguousarray(of_input.reshape(directions * hidden * gates, -1).T))
    product = emit(relax.op.matmul(data, matrix))
    given = emit(relax.op.add(product, constant(tiled(bias[:, :, :, None])[..., 0].reshape(-1))))
    steps, batch, _ = sizes_of(given)
    state = [directions, batch, hidden]
    lengths = node.optional(4)
    if lengths is None:
        lengths = node.builder.emit_te(_all_steps, given, primfunc_name_hint="lengths")
    first = [node.optional(place) for place in (5, 6)[: 1 + (kind == "LSTM")]]
    zeros = emit(relax.op.zeros(state, "float32"))
    begins = [zeros if one is None else one for one in (*first, *[None] * (2 - len(first)))]
    function = node.builder.add_func(recurrence_function(layer), f"{kind.lower()}_steps")
    inner_bias = constant(tiled(inner[:, :, :, None])[..., 0])
    operands = [given, constant(np.ascontiguousarray(of_state)), inner_bias, lengths, *begins]
    types = [relax.TensorType(shape, "float32") for shape in ([steps, *state], state, state)]
    results = emit(relax.call_tir(function, relax.Tuple(operands), types))
    outputs = [emit(relax.TupleGetItem(results, place)) for place in range(2 + (kind == "LSTM"))]
    return relax.Tuple(outputs)


def _all_steps(given: te.Tensor) -> te.Tensor:
    """Return (B,) int32: as many steps as there are."""
    return te.compute((given.shape[1],), lambda _: given.shape[0].astype("int32"), name="lengths")


def _directions(node: ConverterInput) -> tuple[bool, ...]:
    name = str(node.attributes.get("direction", "forward"))
    if name not in _DIRECTIONS:
        raise ValueError(f"attribute 'direction': expected one of {', '.join(_DIRECTIONS)}, got {name!r}")
    return _DIRECTIONS[name]


def _is_rectified(node: ConverterInput, kind: str) -> bool:
    """Return whether the activation is Relu.

    Raises
    ------
    ValueError
        The activations are no common ones.
    """
    usual = _ACTIVATIONS[kind] * len(_directions(node))
    given = node.attributes.get("activations", usual)
    names = [str(one.decode() if isinstance(one, bytes) else one).lower() for one in given]  # type: ignore[union-attr]
    if kind == "RNN" and set(names) == {"relu"}:
        return True
    if names != usual or node.number("clip", 0.0):
        raise ValueError(f"attributes 'activations' and 'clip': expected {usual} without a clip, got {names}")
    return False


def _is_zero(expr: tvm.ir.Expr) -> bool:
    value = constant_value(expr)
    return value is not None and not value.any()
