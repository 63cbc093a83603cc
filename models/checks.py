"""Rules a user's graph must keep before anything else looks at it; each message names the object and the fix."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import defs

from relaxtune.models.dims import may_be_empty
from relaxtune.models.errors import InvalidModelError, ModelShapeError, UnsupportedModelError
from relaxtune.models.onnx_model import dtype_name, list_graphs, nested_graphs

logger = logging.getLogger(__name__)

# The newest opset whose operators are compared with ONNX Runtime here. Newer ones that the installed onnx knows are
# taken, with a warning that names the operators that changed since.
TESTED_OPSET = 26
# IR 3 came with ONNX 1.0; older files are not valid today.
_MIN_IR_VERSION = 3
_STANDARD_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml"})
# ONNX Runtime's fused operators have no schema here; they are passed through to whoever imports the graph.
_CONTRIB_DOMAINS = frozenset({"com.microsoft"})
# Written into the standard domain by ONNX Runtime's optimiser, which alone knows it there.
RUNTIME_OPERATORS = frozenset({"SimplifiedLayerNormalization"})


def check_text(message: Message, where: str = "the model") -> None:
    """Check that every name in the message is text; bytes that are none are kept by protobuf and crash readers later.

    Raises
    ------
    InvalidModelError
        A field of text holds bytes that are not UTF-8.
    """
    for descriptor, value in message.ListFields():
        if descriptor.type == descriptor.TYPE_STRING:
            for text in (value,) if isinstance(value, str | bytes) else value:
                if isinstance(text, bytes):
                    msg = f"{where} has a {descriptor.name} that is not UTF-8 text: {text[:40]!r}; the file is damaged"
                    raise InvalidModelError(msg)
        elif descriptor.type == descriptor.TYPE_MESSAGE:
            nested = (value,) if isinstance(value, Message) else value
            for inner in nested:
                check_text(inner, f"a {descriptor.name} of {where}" if where == "the model" else where)


def check_versions(model: onnx.ModelProto) -> None:
    """Check IR version and opsets against what the installed onnx knows; warn of operators newer than `TESTED_OPSET`.

    Raises
    ------
    UnsupportedModelError
        Newer than the installed onnx.
    InvalidModelError
        No version at all.
    """
    newest_ir = int(onnx.IR_VERSION)
    if model.ir_version < _MIN_IR_VERSION:
        msg = f"the model has IR version {model.ir_version}, expected {_MIN_IR_VERSION} to {newest_ir}; export it again"
        raise InvalidModelError(msg)
    if model.ir_version > newest_ir:
        raise UnsupportedModelError(
            f"the model has IR version {model.ir_version}, the installed onnx {onnx.__version__} reads up to "
            f"{newest_ir}; install a newer onnx, export it with an older one, or set model.ir_version = {newest_ir}"
        )
    opsets = [(_canonical(entry.domain), entry.version) for entry in model.opset_import]
    newest = int(defs.onnx_opset_version())
    declared = [version for domain, version in opsets if domain == ""]
    if not declared and any(_canonical(node.domain) == "" for node in model.graph.node):
        msg = "the model declares no opset for the standard domain; add opset_import {domain: '', version: 18}"
        raise InvalidModelError(msg)
    if len({domain for domain, _ in opsets}) != len(opsets):
        raise InvalidModelError(f"the model declares an opset twice: {opsets}; keep one version per domain")
    if any(version < 1 or version > newest for version in declared):
        raise UnsupportedModelError(
            f"the model declares opset {declared[0]}, the installed onnx {onnx.__version__} supports 1 to {newest}; "
            f"export it with opset_version={newest} or lower, or install a newer onnx"
        )
    if declared and declared[0] > TESTED_OPSET:
        changed = sorted(
            {
                node.op_type
                for graph in list_graphs(model.graph)
                for node in graph.node
                if _canonical(node.domain) == "" and _since(node.op_type, declared[0]) > TESTED_OPSET
            }
        )
        logger.log(
            logging.WARNING if changed else logging.INFO,
            "the model declares opset %d, relaxtune is tested up to %d; operators that changed since: %s",
            declared[0], TESTED_OPSET, ", ".join(changed) or "none",
        )  # fmt: skip


def _since(operator: str, opset: int) -> int:
    """Return the opset that brought the form of a standard operator which `opset` has; 0 of an unknown operator."""
    return int(defs.get_schema(operator, opset).since_version) if defs.has(operator, opset) else 0


def check_signature(model: onnx.ModelProto) -> None:
    """Check that every input is a tensor of a supported dtype with a known rank; only a cache may be empty.

    Raises
    ------
    UnsupportedModelError
        A sequence, a string tensor, or a tensor without a rank.
    ModelShapeError
        A dimension that is zero or negative.
    InvalidModelError
        The graph has no output, or an input without a type.
    """
    if not model.graph.output:
        raise InvalidModelError(f"the graph {model.graph.name!r} has no output; nothing would be computed")
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in weights:
            _check_value(value, "input")
    for value in model.graph.output:
        _check_value(value, "output", rank_needed=False)


def check_ranks(values: Iterable[onnx.ValueInfoProto]) -> None:
    """Check, after shape inference, that every output has a dtype and a rank.

    Raises
    ------
    UnsupportedModelError
        Shape inference could not tell.
    """
    for value in values:
        _check_value(value, "output")


def _check_value(value: onnx.ValueInfoProto, kind: str, *, rank_needed: bool = True) -> None:
    what = f"{kind} {value.name!r}"
    which = value.type.WhichOneof("value")
    if which is None and not rank_needed:
        return
    if which is None:
        raise InvalidModelError(f"{what} has no type; declare its dtype and shape in the graph")
    if which != "tensor_type":
        msg = f"{what} is a {which.removesuffix('_type')}, expected a tensor; take it apart inside the model"
        raise UnsupportedModelError(msg)
    tensor = value.type.tensor_type
    if rank_needed or tensor.elem_type:
        dtype_name(tensor.elem_type, what)
    if rank_needed and not tensor.HasField("shape"):
        msg = f"{what} has no shape, not even a rank; declare its axes (names will do) in the graph"
        raise UnsupportedModelError(msg)
    for axis, dim in enumerate(tensor.shape.dim):
        least = 0 if kind == "input" and may_be_empty(len(tensor.shape.dim), axis) else 1
        if dim.HasField("dim_value") and dim.dim_value < least:
            raise ModelShapeError(
                f"axis {axis} of {what} is {dim.dim_value}, expected a positive number or a name; "
                f"export the model with a real or a dynamic axis"
            )


def check_graph(model: onnx.ModelProto, *, operators: bool = True) -> None:
    """Check names and, unless told otherwise, operators of the graph and its subgraphs.

    Raises
    ------
    InvalidModelError
        A tensor produced twice, an input that nothing produces, or a cycle.
    UnsupportedModelError
        An operator without a schema in a standard domain, or of a domain that is not known.
    """
    if operators:
        _check_all_operators(model)
    _check_scope(model.graph, set())


def _check_all_operators(model: onnx.ModelProto) -> None:
    opsets = {_canonical(entry.domain): entry.version for entry in model.opset_import}
    functions = {(function.domain, function.name) for function in model.functions}
    _check_operators(model.graph.node, opsets, functions)
    for function in model.functions:
        own = {_canonical(entry.domain): entry.version for entry in function.opset_import}
        _check_operators(function.node, own, functions)


def _check_operators(nodes: Sequence[onnx.NodeProto], opsets: dict[str, int], functions: set[tuple[str, str]]) -> None:
    for node in nodes:
        domain = _canonical(node.domain)
        if (node.domain, node.op_type) not in functions:
            _check_operator(node, domain, opsets.get(domain))
        for graph in nested_graphs(node):
            _check_operators(graph.node, opsets, functions)


def _check_operator(node: onnx.NodeProto, domain: str, version: int | None) -> None:
    if domain in _CONTRIB_DOMAINS or (domain == "" and node.op_type in RUNTIME_OPERATORS):
        return
    if domain not in _STANDARD_DOMAINS:
        raise UnsupportedModelError(
            f"{node_label(node)} is of the domain {domain!r}, which is not supported; expected the standard domain, "
            f"{' or '.join(sorted(_CONTRIB_DOMAINS))}, or a function defined in the model"
        )
    if version is None:
        msg = f"{node_label(node)} is of the domain {domain!r}, but the model declares no opset for it"
        raise InvalidModelError(msg)
    if defs.has(node.op_type, version, domain):
        return
    if defs.has(node.op_type, domain):
        since = defs.get_schema(node.op_type, domain).since_version
        hint = f"it exists in opset {since}: export the model with another opset_version"
    else:
        hint = "it is no standard ONNX operator: check its spelling and its domain"
    msg = f"{node_label(node)} is an unknown operator in opset {version} of the domain {domain or 'ai.onnx'!r}; {hint}"
    raise UnsupportedModelError(msg)


def _check_scope(graph: onnx.GraphProto, outer: set[str]) -> None:
    known = set(outer)
    own: set[str] = set()
    inputs = {value.name for value in graph.input}
    _add_unique([value.name for value in graph.input], own, "inputs", graph)
    names = [t.name for t in graph.initializer] + [t.values.name for t in graph.sparse_initializer]
    # An initializer with the name of an input is that input's default value.
    _add_unique([name for name in names if name not in inputs], own, "initializers", graph)
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        msg = f"tensor {duplicate!r} is defined twice, by two initializers of graph {graph.name!r}; rename one"
        raise InvalidModelError(msg)
    known |= own
    produced = {name for node in graph.node for name in node.output if name}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                raise _order_error(graph, node, name, produced)
        for subgraph in nested_graphs(node):
            _check_scope(subgraph, known)
        _add_unique([name for name in node.output if name], own, f"the outputs of {node_label(node)}", graph)
        known.update(node.output)
    for value in graph.output:
        if value.name not in known:
            msg = f"output {value.name!r} of graph {graph.name!r} is produced by no node; remove it or add its node"
            raise InvalidModelError(msg)


def _add_unique(names: Sequence[str], own: set[str], where: str, graph: onnx.GraphProto) -> None:
    for name in names:
        if name in own:
            msg = f"tensor {name!r} is defined twice, the second time by {where} of graph {graph.name!r}; rename one"
            raise InvalidModelError(msg)
        own.add(name)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Put the nodes of a graph and its subgraphs in an order in which each comes after those that it reads.

    ONNX Runtime sorts them itself, and its float16 converter leaves them unsorted. A graph in order, or with a cycle,
    stays as it is.
    """
    for node in graph.node:
        for subgraph in nested_graphs(node):
            sort_nodes(subgraph)
    maker = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = [{maker[name] for name in names_read(node) if name in maker} for node in graph.node]
    readers: dict[int, list[int]] = {}
    for place, makers in enumerate(needs):
        for one in makers:
            readers.setdefault(one, []).append(place)
    ready = [place for place, makers in enumerate(needs) if not makers]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers.get(place, ()):
            needs[reader].discard(place)
            if not needs[reader]:
                heapq.heappush(ready, reader)
    if order != sorted(order) and len(order) == len(needs):
        copies = [onnx.NodeProto.FromString(graph.node[place].SerializeToString()) for place in order]
        del graph.node[:]
        graph.node.extend(copies)


def names_read(node: onnx.NodeProto) -> set[str]:
    """Return the names a node reads, its subgraphs' from outside of them too."""
    names = {name for name in node.input if name}
    for graph in nested_graphs(node):
        inside = {name for inner in graph.node for name in inner.output}
        names |= {name for inner in graph.node for name in names_read(inner)} - inside
        names |= {value.name for value in graph.output} - inside
    return names


def _order_error(graph: onnx.GraphProto, node: onnx.NodeProto, name: str, produced: set[str]) -> InvalidModelError:
    if name not in produced:
        return InvalidModelError(
            f"{node_label(node)} reads {name!r}, which no input, initializer or node of graph {graph.name!r} defines"
        )
    return InvalidModelError(f"graph {graph.name!r} has a cycle: {' -> '.join(_find_cycle(graph))}; break it")


def _find_cycle(graph: onnx.GraphProto) -> list[str]:
    """Return the labels of the nodes of one cycle, first one repeated at the end; empty when there is none."""
    maker = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    needs = {place: {maker[name] for name in node.input if name in maker} for place, node in enumerate(graph.node)}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as e:
        return [_short_label(graph.node[place]) for place in e.args[1]]
    return []


def node_label(node: onnx.NodeProto) -> str:
    """Return how messages call a node."""
    return f"node {_short_label(node)}"


def _short_label(node: onnx.NodeProto) -> str:
    return f"{node.name or '(unnamed)'} ({node.op_type})"


def _canonical(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
