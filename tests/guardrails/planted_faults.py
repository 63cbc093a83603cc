"""Faults planted in random graphs: what a kernel with each would give, to see whether the judge calls it wrong.

    python -m tests.guardrails.planted_faults [--count 20] [--seed 0] [--json FILE]

A planted fault changes one node of a drawn graph; ONNX's own evaluator computes the graph with it. A fault counts where
it changes the answer by more than a ten thousandth. Prints how many the judge found; exits 1 where it called one right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from relaxtune.models import OnnxModel
from tests.guardrails.graph_cases import draw_graph
from tests.guardrails.graph_judge import Arrays, Status, by_definition, distance, judge, wanted_of
from tests.guardrails.near_misses import draw_near_miss

# Below, a fault in one node is lost in what follows it, such as a Sign.
_SHOWS = 1e-4


class Graph:
    """A graph in which one node is to be changed: its constants as arrays, and what each tensor holds."""

    def __init__(self, model: OnnxModel, held: Mapping[str, np.ndarray]) -> None:
        self.proto = onnx.ModelProto.FromString(model.proto.SerializeToString())
        self.held = held
        self.constants = {one.name: numpy_helper.to_array(one) for one in self.proto.graph.initializer}

    def constant(self, array: np.ndarray) -> str:
        name = f"planted{len(self.proto.graph.initializer)}"
        self.proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def after(self, node: onnx.NodeProto, *nodes: onnx.NodeProto) -> bool:
        """Put nodes behind one: they read `raw`, and the last writes what the node wrote."""
        place = next(i for i, one in enumerate(self.proto.graph.node) if one.output[0] == node.output[0])
        name = node.output[0]
        target = self.proto.graph.node[place]
        target.output[0] = "raw"
        nodes[-1].output[0] = name
        for offset, one in enumerate(nodes):
            self.proto.graph.node.insert(place + 1 + offset, one)
        return True


Plant = Callable[[Graph, onnx.NodeProto], bool]


def _attribute(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    return next((int(one.i) for one in node.attribute if one.name == name), default)


def _set(node: onnx.NodeProto, name: str, value: object) -> bool:
    kept = [one for one in node.attribute if one.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return True


def _become(node: onnx.NodeProto, operator: str, *inputs: str) -> bool:
    node.op_type = operator
    del node.attribute[:], node.input[:]
    node.input.extend(inputs)
    return True


def wrong_softmax_axis(graph: Graph, node: onnx.NodeProto) -> bool:
    rank = graph.held[node.input[0]].ndim
    if node.op_type not in ("Softmax", "LogSoftmax") or rank < 2:
        return False
    return _set(node, "axis", (_attribute(node, "axis", -1) + 1) % rank)


def wrong_reduced_axis(graph: Graph, node: onnx.NodeProto) -> bool:
    if not node.op_type.startswith("Reduce") or len(node.input) < 2 or node.input[1] not in graph.constants:
        return False
    shape = graph.held[node.input[0]].shape
    axes = graph.constants[node.input[1]] % len(shape)
    free = [axis for axis in range(len(shape)) if axis not in axes and shape[axis] == shape[axes[0]] > 1]
    if not free:
        return False
    node.input[1] = graph.constant(np.array([free[0], *axes[1:]]))
    return True


def lost_broadcast(graph: Graph, node: onnx.NodeProto) -> bool:
    if node.op_type not in ("Add", "Mul", "Sub", "Div"):
        return False
    for place, name in enumerate(node.input):
        array = graph.constants.get(name)
        if array is not None and array.size > 1:
            node.input[place] = graph.constant(np.full_like(array, array.flat[0]))
            return True
    return False


def wrong_epsilon(graph: Graph, node: onnx.NodeProto) -> bool:
    for place, name in enumerate(node.input):
        array = graph.constants.get(name)
        if node.op_type == "Add" and array is not None and array.dtype.kind == "f" and 0 < array.flat[0] <= 0.01:
            node.input[place] = graph.constant(array * np.float32(100))
            return True
    return False


def swapped_operands(graph: Graph, node: onnx.NodeProto) -> bool:
    del graph
    if node.op_type not in ("Sub", "Div", "Less", "Greater", "LessOrEqual"):
        return False
    first, second = node.input
    node.input[0], node.input[1] = second, first
    return True


def slice_off_by_one(graph: Graph, node: onnx.NodeProto) -> bool:
    if node.op_type != "Slice" or len(node.input) < 5:
        return False
    size = graph.held[node.input[0]].shape[int(graph.constants[node.input[3]][0])]
    start, end, step = (int(graph.constants[node.input[place]][0]) for place in (1, 2, 4))
    start %= size
    if step < 0 or end >= size:
        return False
    node.input[1], node.input[2] = graph.constant(np.array([start + 1])), graph.constant(np.array([end + 1]))
    return True


def lost_nan(graph: Graph, node: onnx.NodeProto) -> bool:
    if not np.isnan(graph.held[node.output[0]]).any():
        return False
    zero = graph.constant(np.array(0, "float32"))
    return graph.after(
        node, helper.make_node("IsNaN", ["raw"], ["is_nan"]), helper.make_node("Where", ["is_nan", zero, "raw"], [""])
    )


def mask_off_by_one(graph: Graph, node: onnx.NodeProto) -> bool:
    for place, name in enumerate(node.input):
        array = graph.constants.get(name)
        if node.op_type == "Add" and array is not None and array.ndim > 1 and array.min() <= -1e4:
            node.input[place] = graph.constant(np.roll(array, 1, -1))
            return True
    return False


def wrong_index(graph: Graph, node: onnx.NodeProto) -> bool:
    if node.op_type != "Gather" or node.input[1] not in graph.constants:
        return False
    indices, size = graph.constants[node.input[1]], graph.held[node.input[0]].shape[_attribute(node, "axis")]
    node.input[1] = graph.constant((indices + 1) % size)
    return True


def lost_transpose(graph: Graph, node: onnx.NodeProto) -> bool:
    shapes = {graph.held[name].shape for name in (node.input[0], node.output[0])}
    return node.op_type == "Transpose" and len(shapes) == 1 and _become(node, "Identity", node.input[0])


def lost_scale(graph: Graph, node: onnx.NodeProto) -> bool:
    array = graph.constants.get(node.input[1]) if node.op_type in ("Div", "Mul") else None
    return array is not None and array.size == 1 and _become(node, "Identity", node.input[0])


def lost_bias(graph: Graph, node: onnx.NodeProto) -> bool:
    name = node.input[1] if node.op_type == "Add" else ""
    small = name in graph.constants and graph.constants[name].ndim <= graph.held[node.input[0]].ndim
    if not small or graph.held[node.input[0]].shape != graph.held[node.output[0]].shape:
        return False
    return _become(node, "Identity", node.input[0])


def erf_by_tanh(graph: Graph, node: onnx.NodeProto) -> bool:
    """GELU's approximation by tanh, where the graph asks for erf: off by 5e-4 at most."""
    if node.op_type != "Erf":
        return False
    x = node.input[0]
    one, three = graph.constant(np.array(1.1283791671, "float32")), graph.constant(np.array(0.100953, "float32"))
    place = next(i for i, other in enumerate(graph.proto.graph.node) if other.output[0] == node.output[0])
    before = [("Mul", x, x, "p0"), ("Mul", "p0", three, "p1"), ("Add", "p1", one, "p2"), ("Mul", "p2", x, "p3")]
    for offset, (operator, left, right, name) in enumerate(before):
        graph.proto.graph.node.insert(place + offset, helper.make_node(operator, [left, right], [name]))
    return _become(graph.proto.graph.node[place + len(before)], "Tanh", "p3")


def four_digits(graph: Graph, node: onnx.NodeProto) -> bool:
    """A function computed to four digits; float16 has no more."""
    halves = any(array.dtype == np.float16 for array in graph.held.values())
    if halves or node.op_type not in ("Tanh", "Sigmoid", "Exp", "Softmax", "Sqrt"):
        return False
    return graph.after(node, helper.make_node("Mul", ["raw", graph.constant(np.array(1.0005, "float32"))], [""]))


def lost_tail(graph: Graph, node: onnx.NodeProto) -> bool:
    """The last element is not written."""
    array = graph.held[node.output[0]]
    if array.dtype != np.float32 or array.size < 2:
        return False
    written = np.arange(array.size).reshape(array.shape) < array.size - 1
    zero = graph.constant(np.array(0, "float32"))
    return graph.after(node, helper.make_node("Where", [graph.constant(written), "raw", zero], [""]))


def mean_of_one_less(graph: Graph, node: onnx.NodeProto) -> bool:
    if node.op_type != "ReduceMean":
        return False
    count = graph.held[node.input[0]].size // max(1, graph.held[node.output[0]].size)
    factor = np.array(count / (count - 1) if count > 1 else 1, "float32")
    return graph.after(node, helper.make_node("Mul", ["raw", graph.constant(factor)], [""]))


def swapped_parts(graph: Graph, node: onnx.NodeProto) -> bool:
    del graph
    if node.op_type != "Concat":
        return False
    parts = list(node.input)
    del node.input[:]
    node.input.extend(parts[::-1])
    return True


def smallest_for_largest(graph: Graph, node: onnx.NodeProto) -> bool:
    del graph
    head, kind = node.op_type[:-3], node.op_type[-3:]
    if head in ("Arg", "Reduce") and kind in ("Max", "Min"):
        node.op_type = head + ("Min" if kind == "Max" else "Max")
        return True
    return node.op_type == "TopK" and _set(node, "largest", 1 - _attribute(node, "largest", 1))


def scattered_backwards(graph: Graph, node: onnx.NodeProto) -> bool:
    if node.op_type != "ScatterElements" or node.input[1] not in graph.constants:
        return False
    node.input[1] = graph.constant(np.flip(graph.constants[node.input[1]], _attribute(node, "axis")))
    return True


def lost_beta(graph: Graph, node: onnx.NodeProto) -> bool:
    del graph
    if node.op_type != "LayerNormalization" or len(node.input) < 3:
        return False
    del node.input[2]
    return True


def zero_point_off_by_one(graph: Graph, node: onnx.NodeProto) -> bool:
    """Each value is a step of the quantiser off, which a single one may be beside a tie."""
    if node.op_type != "QuantizeLinear":
        return False
    zero = graph.constants[node.input[2]]
    node.input[2] = graph.constant(zero + zero.dtype.type(1))
    return True


def scales_of_the_next_column(graph: Graph, node: onnx.NodeProto) -> bool:
    scales = graph.constants.get(node.input[1]) if node.op_type == "DequantizeLinear" else None
    if scales is None or scales.size < 2:
        return False
    node.input[1] = graph.constant(np.roll(scales, 1))
    return True


PLANTS: tuple[Plant, ...] = (
    wrong_softmax_axis, wrong_reduced_axis, lost_broadcast, wrong_epsilon, swapped_operands, slice_off_by_one, lost_nan,
    mask_off_by_one, wrong_index, lost_transpose, lost_scale, lost_bias, erf_by_tanh, four_digits, lost_tail,
    mean_of_one_less, swapped_parts, smallest_for_largest, scattered_backwards, lost_beta,
    zero_point_off_by_one, scales_of_the_next_column,
)  # fmt: skip


def planted(plant: Plant, seed: int) -> Iterator[tuple[OnnxModel, dict[str, np.ndarray], Arrays, Arrays]]:
    """Yield graphs of a seed with the answer of ONNX Runtime and that of a graph with the fault, where it shows."""
    for draw in (draw_graph, draw_near_miss):
        model, feeds = draw(seed)
        wanted = wanted_of(model, feeds)
        if isinstance(wanted, str):
            continue
        held = by_definition(model, feeds)
        for place in range(len(model.proto.graph.node)):
            graph = Graph(model, held)
            if not plant(graph, graph.proto.graph.node[place]):
                continue
            try:
                faulty = by_definition(replace(model, proto=graph.proto), feeds)
            except (TypeError, ValueError, IndexError):  # shapes that no longer fit: it would crash
                continue
            got = [faulty[spec.name] for spec in model.outputs]
            if distance(got, [held[spec.name] for spec in model.outputs]) > _SHOWS:
                yield model, feeds, wanted, got
                break


def verdicts(plant: Plant, count: int, first_seed: int = 0) -> list[Status]:
    """Return what the judge says of so many planted faults."""
    found = []
    seed = first_seed
    while len(found) < count:
        found += [judge(*case)[0] for case in planted(plant, seed)]
        seed += 1
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="of each fault")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--json", type=Path, help="where the counts go")
    args = parser.parse_args()
    counts = {plant.__name__: Counter(verdicts(plant, args.count, args.seed)) for plant in PLANTS}
    for name, count in counts.items():
        print(f"{name}: {', '.join(f'{number} {status.value}' for status, number in count.items())}")
    if args.json:
        args.json.write_text(json.dumps(counts, indent=1) + "\n")
    sys.exit(any(count[Status.RIGHT] for count in counts.values()))


if __name__ == "__main__":
    main()
