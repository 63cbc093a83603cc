"""The relations between the symbolic axes of a graph: `attention_mask` has `past + sequence` columns.

Exporters give each axis a name of its own and do not say which belong together. `find_relations` reads it from the
graph (`models.axes.flow`); the loader then writes the names that are free into the graph, so that everything behind it
sees one name for one size. `axis_sizes` chooses sizes that keep the relations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import lcm

import onnx

from relaxtune.models.axes.attention_rules import CACHED_ATTENTION
from relaxtune.models.axes.facts import ONE
from relaxtune.models.axes.flow import AxisFlow, dims_of, input_symbols, nodes_of
from relaxtune.models.axes.windows import has_windows, with_room
from relaxtune.models.dims import Dim, evaluate_dim
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.input_roles import GraphUses
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.models.spec import AxisRelation
from relaxtune.polynomials import Computed, Polynomial, quotient

_BATCH, _LENGTH = 2, 16
# Sizes that are tried of each axis, and how many combinations of them.
_SEARCHED, _TRIALS = 65, 20_000
# The largest stride of an image model that is looked for, and how many sizes are tried.
_LARGEST_MULTIPLE, _TRIED = 256, 2048


def find_relations(model: onnx.ModelProto) -> tuple[AxisRelation, ...]:
    """Return what a graph demands of the symbolic axes of its inputs; none where fewer than two names are there."""
    names = input_symbols(model)
    if not names:
        return ()
    flow = AxisFlow(model)
    masks = _mask_symbols(model)
    bounds = [
        (gap, table)
        for size, least, table in flow.at_least
        if (gap := _bound_masks(flow, size - least, masks)) is not None
    ]
    places = _places(model)
    relations = [
        AxisRelation(name, "=", str(size), tuple(places[name]))
        for name in names
        if name in flow.solved and _is_known(size := flow.resolve(flow.solved[name]))
    ]
    multiples: dict[str, int] = {}
    for left, right in flow.equal:
        gap = flow.resolve(left - right)
        axis = next(iter(gap.axes), "")
        fitting = _fitting_sizes(gap, axis) if gap.axes == {axis} and axis in places else range(0)
        if not fitting:
            bounds += [(left - right, "the graph"), (right - left, "the graph")]
        elif fitting.step > 1:
            multiples[axis] = lcm(multiples.get(axis, 1), fitting.step)
        else:
            ends = {">=": fitting[0]} if fitting[-1] == _TRIED else {">=": fitting[0], "<=": fitting[-1]}
            relations += [
                AxisRelation(axis, sign, str(size), tuple(places[axis]), "the graph") for sign, size in ends.items()
            ]
    for axis, number in multiples.items():
        whole = str(quotient(Polynomial.symbol(axis), Polynomial.number(number)) * number)
        relations.append(AxisRelation(axis, "<=", whole, tuple(places[axis]), "the graph"))
    for gap, table in bounds:
        relations += _inequality(flow.resolve(gap), places, table)
    return tuple(dict.fromkeys(relations))


def _fitting_sizes(gap: Polynomial, axis: str) -> range:
    """Return sizes of an axis at which a difference is zero: multiples of a number, or all between two; or none.

    Image models join maps of several strides. Sizes that are no multiple of the largest may fit by chance, and code
    for them would compute each size anew.
    """
    zero = [gap.at({axis: size}) == 0 for size in range(1, _TRIED + 1)]
    step = next((one for one in range(1, _LARGEST_MULTIPLE + 1) if all(zero[one - 1 :: one])), None)
    if step is not None:
        return range(step, _TRIED + 1, step)
    first, many = zero.index(True) if True in zero else 0, sum(zero)
    return range(first + 1, first + 1 + many) if all(zero[first : first + many]) else range(0)


def bindings_of(relations: tuple[AxisRelation, ...]) -> dict[str, int | str]:
    """Return what replaces the names of axes in the graph: numbers, names, and sums of them."""
    exact = {relation.axis: relation.size for relation in relations if relation.sign == "="}
    return {
        axis: int(size) if size.isdecimal() else size
        for axis, size in exact.items()
        # TVM reads a dimension from left to right, without the precedence of products.
        if re.fullmatch(r"\w+( \+ \w+)*", size)
    }


def limits_of(relations: Sequence[AxisRelation]) -> tuple[AxisRelation, ...]:
    """Return what calls have to keep: bounds, and as two bounds each equality that the graph does not say itself.

    TVM takes two sizes that a check compares for one, and leaves the check out.
    """
    written = bindings_of(tuple(relations))
    found: list[AxisRelation] = []
    for one in relations:
        if one.sign != "=":
            found.append(one)
        elif one.axis not in written:
            found += [replace(one, sign=sign, table="the graph") for sign in (">=", "<=")]
    return tuple(found)


def check_bounds(relations: Sequence[AxisRelation], sizes: Mapping[str, Dim], what: str) -> None:
    """Check that sizes of axes keep what the graph asks of them; axes without a size may be empty.

    Raises
    ------
    ModelShapeError
        They do not; the message names the table that is too short.
    """
    numbers = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    problems = [problem for one in relations if (problem := one.problem({**_empty(one), **numbers})) is not None]
    if problems:
        raise ModelShapeError(f"{what}: {'; '.join(problems)}. Give sizes within it, or export the model with more")


def axis_sizes(model: OnnxModel, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return a size for every symbolic axis of the inputs that keeps the graph's relations.

    Parameters
    ----------
    model
        Its axes without a given size get 2 where they are a batch (1 in ONNX Runtime's decoders), 16 elsewhere,
        doubled until poolings and convolutions have room, then what the relations ask for.
    given
        Sizes that stay as they are.
    """
    fixed = dict(given or {})
    names = [name for name in input_symbols(model.proto) if name not in fixed]
    batches = {
        axis for spec in model.inputs for axis in spec.shape[:1] if len(spec.shape) > 1 and isinstance(axis, str)
    }
    later = {axis for spec in model.inputs for axis in spec.shape[1:]}
    # ONNX Runtime takes several new tokens after a cache of one row only.
    rows = 1 if any(node.op_type == CACHED_ATTENTION and node.input[3] for node in nodes_of(model.proto)) else _BATCH
    sizes = {n: rows if "batch" in n.lower() or n in batches - later else _LENGTH for n in sorted(names)} | fixed
    lengths = [name for name in names if sizes[name] == _LENGTH]
    if lengths and has_windows(model.proto):
        sizes = with_room(model.proto, sizes, lengths)
    if any(node.op_type == "If" for node in model.proto.graph.node):
        flow = AxisFlow(model.proto)
        for left, right in flow.usual:
            gap = flow.resolve(left - right)
            axis = next(iter(gap.axes), "")
            fitting = _fitting_sizes(gap, axis) if gap.axes == {axis} and axis in names else range(0)
            if fitting:
                sizes[axis] = next((size for size in fitting if size >= sizes[axis]), fitting[-1])
    for relation in model.relations:
        if relation.multiple is not None and relation.axis in names:
            sizes[relation.axis] = -(-sizes[relation.axis] // relation.multiple) * relation.multiple
        elif relation.sign == "<=":
            _shrink(sizes, relation, [name for name in names if name in _terms(relation.axis)])
    sizes = _followed(sizes, model.relations, names)
    broken = any(relation.problem(sizes) for relation in model.relations)
    return _searched(sizes, model.relations, names) if broken else sizes


def _empty(relation: AxisRelation) -> dict[str, int]:
    """Return 0 for each axis of a sum that has a largest number."""
    bounded = relation.sign == "<=" and relation.size.isdecimal()
    return {name: 0 for name in _terms(relation.axis) if bounded and not name.isdecimal()}


def _terms(size: str) -> list[str]:
    """Return the names and numbers in a size."""
    return [part for part in re.split(r"min\(|[()]|, | (?:\+|-|\*|//) ", size) if part]


def _searched(sizes: Mapping[str, int], relations: Sequence[AxisRelation], names: Sequence[str]) -> dict[str, int]:
    """Return sizes near the given ones that keep all relations; the given ones where none are found."""
    exact = {one.axis for one in relations if one.sign == "="}
    terms = {name for one in relations for name in (*_terms(one.axis), *_terms(one.size))}
    free = [name for name in names if name in terms - exact]
    near = [sorted(range(1, _SEARCHED), key=lambda size, at=sizes[name]: abs(size - at)) for name in free]  # type: ignore[misc]
    for chosen in islice(product(*near), _TRIALS):
        tried = _followed({**sizes, **dict(zip(free, chosen, strict=True))}, relations, names)
        if not any(one.problem(tried) for one in relations):
            return tried
    return dict(sizes)


def _followed(sizes: dict[str, int], relations: Sequence[AxisRelation], names: Sequence[str]) -> dict[str, int]:
    """Return sizes in which an axis that follows from others does, or is as large as it has to be."""
    for relation in relations:
        size = evaluate_dim(relation.size, sizes)
        if relation.axis in names and relation.sign != "<=" and isinstance(size, int):
            sizes[relation.axis] = size if relation.sign == "=" else max(sizes[relation.axis], size)
    return sizes


def _shrink(sizes: dict[str, int], relation: AxisRelation, free: list[str]) -> None:
    """Halve the largest axis that is not given until the sum keeps its bound."""
    while free:
        total = evaluate_dim(relation.axis, sizes)
        largest = max(free, key=lambda name: sizes[name])
        most = evaluate_dim(relation.size, sizes)
        if not isinstance(total, int) or not isinstance(most, int) or total <= most or sizes[largest] == 1:
            return
        sizes[largest] = -(-sizes[largest] // 2)


def _bound_masks(flow: AxisFlow, gap: Polynomial, masks: set[str]) -> Polynomial | None:
    """Take a mask that must reach a size to have it; return a bound, 0 or more, that is left.

    A longer mask would do as well. A shorter one is read beyond its end, and the graph computes with what is there.
    """
    gap = flow.resolve(gap)
    for longer, shorter in _pairs(gap):
        if longer in masks:
            flow.equate(Polynomial.symbol(longer), Polynomial.symbol(shorter))
            gap = flow.resolve(gap)
    for name in (name for name in gap.names if name in masks):
        size = gap.solved_for(name)
        if size is not None and size.names and size.is_positive and gap + size == Polynomial.symbol(name):
            flow.equate(Polynomial.symbol(name), size)
            return None
    return gap if gap.names else None


def _pairs(gap: Polynomial) -> Iterator[tuple[str, str]]:
    """Yield (a, b) for each a * c - b * c: a flattened table is indexed by rows of another one."""
    for above, plus in gap.terms:
        for below, minus in gap.terms:
            left, right = set(above) - set(below), set(below) - set(above)
            if plus == -minus and plus > 0 and len(above) == len(below) > 1 and len(left) == len(right) == 1:
                yield left.pop(), right.pop()


def _inequality(gap: Polynomial, places: Mapping[str, list[str]], table: str) -> list[AxisRelation]:
    """Return `gap >= 0` as a bound of one axis, or of a sum of axes by a number; nothing for another form."""
    least, most = (Polynomial(tuple((names, abs(factor)) for names, factor in gap.terms if (factor < 0) is below))
                   for below in (True, False))  # fmt: skip
    if not _is_known(gap) or not (gap.names and least.terms):
        return []
    if most.value is not None:
        return [AxisRelation(str(least), "<=", str(most), tuple(places.get(str(least), ())), table)]
    if least == ONE and not any(isinstance(name, Computed) for name in most.names):
        return []  # axes have a place
    return [AxisRelation(str(most), ">=", str(least), tuple(places.get(str(most), ())), table)]


def _is_known(size: Polynomial) -> bool:
    return not any(name.startswith("?") for name in size.axes)


def _mask_symbols(model: onnx.ModelProto) -> set[str]:
    """Return the names that stand in the sizes of masks alone."""
    uses = GraphUses(model)
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for value in model.graph.input:
        is_mask = "mask" in value.name.lower() or bool(uses.mask_use(value.name))
        names[is_mask].update(dim for dim in dims_of(value) if isinstance(dim, str))
    return names[True] - names[False]


def _places(model: onnx.ModelProto) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for value in model.graph.input:
        for axis, dim in enumerate(dims_of(value)):
            places.setdefault(str(dim), []).append(f"{value.name}[{axis}]")
    return places
