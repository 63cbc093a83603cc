"""The graphs of an artifact that generates: a step of any sizes, and decode steps of known ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaxtune.models import OnnxModel
from relaxtune.models.buckets import Bucket
from relaxtune.models.inputs import index_limits
from relaxtune.models.spec import VISIBLE
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes.generation.caches import Decoder, find_decoder
from relaxtune.pipeline.passes.generation.step import StepOptions, as_step
from relaxtune.schedules.targets import ResolvedTarget

# Tokens of a sequence where neither the user nor a table of the model sets a limit, and the most that are searched for.
_DEFAULT_LENGTH, _LENGTH_MAX = 2048, 2**22
# The least number of positions that a decode step of known sizes looks at.
_LEAST_VISIBLE = 256


def generation_graphs(
    graph: ImportedGraph,
    max_length: int | None,
    half: str | None,
    sizes: Mapping[str, Sequence[int]],
    target: ResolvedTarget,
    encoder: OnnxModel | None = None,
) -> tuple[ImportedGraph, list[tuple[Bucket, ImportedGraph]]]:
    """Return a decoder as a step of any sizes, and as decode steps for some.

    Parameters
    ----------
    graph : ImportedGraph
        A decoder with the size of its caches free.
    max_length : int or None
        Tokens of a sequence; None takes what the model allows, 2,048 at most.
    half : str or None
        Dtype of the caches in place of float32.
    sizes : mapping
        Sizes of the batch to have decode steps for; 1 by default.
    target : ResolvedTarget
        Decode steps of a GPU know how many positions they look at, as CUDA graphs have to: there are some for each
        batch.
    encoder : OnnxModel or None
        The model whose outputs are inputs of the decoder, and whose inputs are those with `encoder_` before their name.

    Raises
    ------
    UsageError
        The graph is no decoder, its tables do not reach `max_length`, or `sizes` names another axis.
    """
    made = set() if encoder is None else {one.name for one in encoder.outputs}
    made |= set() if encoder is None else {f"encoder_{one.name}" for one in encoder.inputs}
    given = [place for place, one in enumerate(graph.inputs) if one.name in made]
    decoder = find_decoder(graph.mod, graph.name, given)
    options = StepOptions(_capacity(graph.model, decoder, max_length), target, half, given)
    batch, new = str(decoder.batch), str(decoder.new)
    if unknown := sizes.keys() - {batch}:
        raise UsageError(
            f"--generate makes code for sizes of the batch alone, got --bucket {min(unknown)}=...; expected {batch}=..."
        )
    lengths = [axis for place in given for axis in graph.inputs[place].shape[1:]]
    fixed: list[dict[str, int]] = [{}]
    if not isinstance(decoder.batch, int):
        fixed = [{batch: size} for size in sizes.get(batch, (1,))]
    if not isinstance(decoder.new, int):
        fixed = [{**one, new: 1} for one in fixed]
    if target.kind == "cuda" and all(isinstance(axis, int) for axis in lengths):
        fixed = [{**one, VISIBLE: length} for one in fixed for length in visible_lengths(options.capacity)]
    steps = []
    for one in filter(None, fixed):
        bucket = Bucket(tuple(one.items()))
        # Tasks and records tell the modules of a job apart by this name.
        name = f"{graph.name}[{bucket.name}]"
        named = replace(graph, name=name, model=replace(graph.model, name=name))
        steps.append((bucket, as_step(named, options, one)))
    return as_step(graph, options), steps


def visible_lengths(capacity: int) -> list[int]:
    """Return the numbers of positions that there are decode steps for: each at most half as large again."""
    found, length = [], _LEAST_VISIBLE
    while length < capacity:
        found.append(length)
        length = length * 3 // 2 if length & (length - 1) == 0 else length // 3 * 4
    return [*found, capacity]


def _capacity(model: OnnxModel, decoder: Decoder, max_length: int | None) -> int:
    """Return how many tokens a sequence may have, at most what the tables of a model have places for."""
    past, others = str(decoder.past.name), dict.fromkeys((str(decoder.batch), str(decoder.new)), 1)

    def ends(before: int) -> bool:
        return any(one.problem({**others, past: before}) is not None for one in model.relations)

    limit = bisect_left(range(_LENGTH_MAX), True, key=ends)
    if decoder.positions is not None:
        limit = min([limit, *(one.most + 1 for one in index_limits(model) if one.input == decoder.positions.name)])
    if max_length is not None and max_length > limit:
        raise UsageError(f"--max-length {max_length}: the tables of {model.name} reach {limit} tokens")
    return max_length or min(limit, _DEFAULT_LENGTH)
