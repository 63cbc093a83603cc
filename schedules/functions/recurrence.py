"""A recurrent layer (LSTM, GRU, RNN) over a sequence: the steps, one after another, as one function.

Notation: T steps, B sequences, D directions, H units in tiles of L, G gates. What the steps take from their inputs, all
at once, is a matmul before: `gates` (T, B, D * H / L * G * L). A step then adds what it takes from the step before,

    pre[d, b, tile, g * L + l] = sum over k of h[d, b, k] * weights[d, tile, k, g * L + l],

and a unit becomes what ONNX's operators say. A sequence has `lengths[b]` steps; behind them its outputs are 0, and a
reversed direction begins with the last of them.

The function computes (gates, weights, bias, lengths (B,) int32, first_h, first_c (D, B, H)) -> (y (T, D, B, H), last_h,
last_c (D, B, H)), float32; `bias` (D, H / L, G * L) is what a GRU adds to h's part before its reset gate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import RECURRENCE_ATTR

#: Gates of each kind of layer, in ONNX's order: `iofc`, `zrh`, `i`.
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_TILE_MAX = 16
# Multiplications of a step from which the cores share it.
_PARALLEL_MIN = 1 << 16
# Threads of a GPU that share one sum.
_SHARES = 4


@dataclass(frozen=True)
class Recurrence:
    """A recurrent layer; `reversed` has an entry a direction, `rectified` is an RNN's activation, else tanh."""

    kind: str
    hidden: int
    reversed: tuple[bool, ...]
    rectified: bool = False

    @property
    def gates(self) -> int:
        """G."""
        return GATES[self.kind]

    @property
    def lanes(self) -> int:
        """L, which divides the units."""
        return math.gcd(self.hidden, _TILE_MAX)

    @property
    def tiles(self) -> int:
        """H / L."""
        return self.hidden // self.lanes

    def to_json(self) -> str:
        """Return the layer as text: the function's mark."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recurrence:
        """Return the layer that `to_json` wrote."""
        document = json.loads(text)
        return cls(**{**document, "reversed": tuple(document["reversed"])})


def recurrence_function(layer: Recurrence, *, on_gpu: bool = False) -> tirx.PrimFunc:
    """Return the function of a layer, its code that of a CPU, or kernels of a GPU, one a step."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        steps, batch = tirx.Var("steps", "int64"), tirx.Var("batch", "int64")
        directions, columns = len(layer.reversed), layer.gates * layer.lanes
        state = [directions, batch, layer.hidden]
        shapes: dict[str, Sequence[tirx.Expr | int]] = {
            "gates": [steps, batch, directions * layer.tiles * columns],
            "weights": [directions, layer.tiles, layer.hidden, columns],
            "bias": [directions, layer.tiles, columns],
            "lengths": [batch],
            "first_h": state,
            "first_c": state,
            "y": [steps, *state],
            "last_h": state,
            "last_c": state,
        }
        buffers = {
            name: T.arg(name, T.Buffer(list(shape), "int32" if name == "lengths" else "float32"))
            for name, shape in shapes.items()
        }
        step = _Step(layer, buffers, steps, batch)
        _emit_for_gpu(step) if on_gpu else _emit_for_cpu(step)
    return builder.get().without_attr("global_symbol").with_attr(RECURRENCE_ATTR, layer.to_json())


class _Step:
    """The parts of a step that both forms share."""

    def __init__(self, layer: Recurrence, buffers: dict[str, tirx.Var], steps: tirx.Expr, batch: tirx.Expr) -> None:
        self.layer, self.buffers, self.steps, self.batch = layer, buffers, steps, batch
        self.jobs = len(layer.reversed) * batch * layer.tiles

    def locate(self, job: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """Return the direction, sequence and tile of a job."""
        rest = job // self.layer.tiles
        return T.Bind(rest // self.batch), T.Bind(rest % self.batch), T.Bind(job % self.layer.tiles)

    def length(self, b: tirx.Expr) -> tirx.Expr:
        """Return the steps of a sequence, which a caller may say wrong, within those that there are."""
        return T.Bind(tirx.max(tirx.min(tirx.Cast("int64", self.buffers["lengths"][b]), self.steps), 0))

    def place(self, s: tirx.Expr, d: tirx.Expr, length: tirx.Expr) -> tirx.Expr:
        """Return the place in the sequence of a step, which a reversed direction counts from the end."""
        if not any(self.layer.reversed):
            return s
        backwards = tirx.any(*[d == index for index, back in enumerate(self.layer.reversed) if back])
        return tirx.Select(tirx.all(backwards, s < length), length - 1 - s, s)

    def before(self, s: tirx.Expr, d: tirx.Expr, b: tirx.Expr, length: tirx.Expr, unit: tirx.Expr) -> tirx.Expr:
        """Return a unit of the step before."""
        earlier = self.place(tirx.max(s - 1, 0), d, length)
        return tirx.Select(s == 0, self.buffers["first_h"][d, b, unit], self.buffers["y"][earlier, d, b, unit])

    def begin(self, d: tirx.Expr, b: tirx.Expr, unit: tirx.Expr) -> None:
        """Emit what a sequence without steps gives."""
        for role in "hc":
            T.buffer_store(self.buffers[f"last_{role}"], self.buffers[f"first_{role}"][d, b, unit], [d, b, unit])

    def update(
        self,
        place: Sequence[tirx.Expr],
        length: tirx.Expr,
        lane: tirx.Expr,
        sums: Callable[[tirx.Expr], tirx.Expr],
        held: tirx.Expr,
    ) -> None:
        """Emit what a unit becomes; `sums` gives a column's sum, `held` is the unit in the step before."""
        s, d, b, tile = place
        layer, buffers, lanes = self.layer, self.buffers, self.layer.lanes
        at, unit = self.place(s, d, length), tile * lanes + lane
        columns = layer.gates * lanes
        first = (d * layer.tiles + tile) * columns + lane

        def gate(number: int) -> tirx.Expr:
            return buffers["gates"][at, b, first + number * lanes]

        def pre(number: int) -> tirx.Expr:
            return gate(number) + sums(number * lanes + lane)

        cell = buffers["last_c"][d, b, unit]
        if layer.kind == "LSTM":
            kept = tirx.sigmoid(pre(2)) * cell + tirx.sigmoid(pre(0)) * tirx.tanh(pre(3))
            result = tirx.sigmoid(pre(1))
        elif layer.kind == "GRU":
            inner = sums(2 * lanes + lane) + buffers["bias"][d, tile, 2 * lanes + lane]
            candidate = tirx.tanh(gate(2) + tirx.sigmoid(pre(1)) * inner)
            share = tirx.sigmoid(pre(0))
            result = (1 - share) * candidate + share * held
        else:
            result = tirx.max(pre(0), tirx.const(0.0, "float32")) if layer.rectified else tirx.tanh(pre(0))
        goes_on = s < length
        if layer.kind == "LSTM":
            T.buffer_store(buffers["last_c"], tirx.Select(goes_on, kept, cell), [d, b, unit])
            result = result * tirx.tanh(cell)
        T.buffer_store(buffers["y"], tirx.Select(goes_on, result, tirx.const(0.0, "float32")), [at, d, b, unit])
        last = tirx.Select(goes_on, buffers["y"][at, d, b, unit], buffers["last_h"][d, b, unit])
        T.buffer_store(buffers["last_h"], last, [d, b, unit])


def _emit_for_cpu(step: _Step) -> None:
    layer, buffers = step.layer, step.buffers
    lanes, columns = layer.lanes, layer.gates * layer.lanes
    shared = layer.hidden * layer.hidden * layer.gates >= _PARALLEL_MIN
    with T.serial(0, step.jobs) as job:
        d, b, tile = step.locate(job)
        with T.vectorized(0, lanes) as lane:
            step.begin(d, b, tile * lanes + lane)
    with T.serial(0, step.steps) as s, (T.parallel if shared else T.serial)(0, step.jobs) as job:
        d, b, tile = step.locate(job)
        length = step.length(b)
        held = T.alloc_buffer([layer.hidden], "float32", scope="global")
        sums = T.alloc_buffer([columns], "float32", scope="global")
        with T.serial(0, layer.hidden) as k:
            T.buffer_store(held, step.before(s, d, b, length, k), [k])
        with T.unroll(0, layer.gates) as g, T.vectorized(0, lanes) as lane:
            T.buffer_store(sums, tirx.const(0.0, "float32"), [g * lanes + lane])
        with T.serial(0, layer.hidden) as k, T.unroll(0, layer.gates) as g, T.vectorized(0, lanes) as lane:
            column = g * lanes + lane
            T.buffer_store(sums, sums[column] + held[k] * buffers["weights"][d, tile, k, column], [column])
        with T.vectorized(0, lanes) as lane:
            step.update((s, d, b, tile), length, lane, lambda column: sums[column], held[tile * lanes + lane])


def _emit_for_gpu(step: _Step) -> None:
    layer, buffers = step.layer, step.buffers
    lanes, columns = layer.lanes, layer.gates * layer.lanes
    blocks = tirx.Cast("int32", step.jobs)
    with T.launch_thread("blockIdx.x", blocks) as job, T.launch_thread("threadIdx.x", lanes) as thread:
        d, b, tile = step.locate(tirx.Cast("int64", job))
        step.begin(d, b, tile * lanes + thread)
    threads = columns * _SHARES
    with (
        T.serial(0, step.steps) as s,
        T.launch_thread("blockIdx.x", blocks) as job,
        T.launch_thread("threadIdx.x", threads) as thread,
    ):
        shares = T.alloc_buffer([_SHARES, columns], "float32", scope="shared")
        total = T.alloc_buffer([1], "float32", scope="local")
        d, b, tile = step.locate(tirx.Cast("int64", job))
        length = step.length(b)
        share, column = T.Bind(thread // columns), T.Bind(thread % columns)
        T.buffer_store(total, tirx.const(0.0, "float32"), [0])
        with T.serial(0, (layer.hidden + _SHARES - 1) // _SHARES) as part:
            k = part * _SHARES + share
            with T.If(k < layer.hidden), T.Then():
                value = step.before(s, d, b, length, k) * buffers["weights"][d, tile, k, column]
                T.buffer_store(total, total[0] + value, [0])
        T.buffer_store(shares, total[0], [share, column])
        T.evaluate(T.tvm_storage_sync("shared"))
        with T.If(thread < lanes), T.Then():

            def summed(place: tirx.Expr) -> tirx.Expr:
                return sum((shares[number, place] for number in range(1, _SHARES)), start=shares[0, place])

            unit = tile * lanes + thread
            held = step.before(s, d, b, length, unit)
            step.update((s, d, b, tile), length, thread, summed, held)


def layer_of(func: tirx.PrimFunc) -> Recurrence | None:
    """Return the layer that a function is marked with; None for any other function."""
    mark = func.attrs.get(RECURRENCE_ATTR) if func.attrs else None
    return None if mark is None else Recurrence.from_json(str(mark))
