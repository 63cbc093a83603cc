"""The logits of an artifact that generates beside the model's own, token by token over the same texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from relaxtune.models import OnnxModel
from relaxtune.models.spec import Generation, numpy_dtype
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.tvm_runtime.library import array_of
from relaxtune.pipeline.validate.reference import Reference

# Tokens of a text, and how many of them follow the prompt. A prompt is computed in two parts.
_TOKENS, _FOLLOWING = 40, 16
# Places of an encoder's output, where it has no length of its own.
_CONTEXT = 7
# Sequences of a sample, in turn; where there is more than one, they have several lengths.
_BATCHES = (1, 3)


def steps_of(
    module: Module, model: OnnxModel, reference: Reference, samples: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Give the logits [steps, batch, vocabulary] of the model and of the artifact, for some random texts."""
    generation, specs = module.generator.generation, {spec.name: spec for spec in model.inputs}
    names, dtypes = generation.names, {name: numpy_dtype(spec.dtype) for name, spec in specs.items()}
    for sample in range(samples):
        draw = np.random.default_rng([seed, sample])
        sizes = _BATCHES if isinstance(generation.batch, str) else (generation.batch,)
        batch, length = sizes[sample % len(sizes)], min(_TOKENS, generation.capacity)
        ids = draw.integers(0, generation.vocabulary, (batch, length))
        prompt = max(length - _FOLLOWING, 1)
        padding = draw.integers(0, max(prompt // 2, 1), batch) * (batch > 1) * generation.pads
        context = _context(model, generation, batch, draw)
        module.generator.start(padding.tolist(), context=context)
        caches = {}
        for name, _ in names.caches:
            _, heads, _, width = specs[name].shape
            caches[name] = np.zeros([batch, int(heads), 0, int(width)], dtypes[name])
        places = np.arange(length)[None]
        seen, own = places >= padding[:, None], np.maximum(places - padding[:, None], 0)
        most = generation.new if isinstance(generation.new, int) else length
        expected, got = [], []
        for start, end in pairwise([0, *([prompt // 2] if prompt > 1 else []), *range(prompt, length + 1)]):
            got.append(array_of(module.generator.feed(ids[:, start:end])))
            for first in range(start, end, most):
                last = min(first + most, end)
                parts = [(names.tokens, ids[:, first:last]), (names.mask, seen[:, :last])]
                parts.append((names.positions, own[:, first:last]))
                given = {name: array.astype(dtypes[name]) for name, array in parts if name is not None}
                outputs = reference.run({**given, **context, **caches})
                caches = {name: outputs[grown].astype(dtypes[name]) for name, grown in names.caches}
            expected.append(outputs[names.logits][:, -1])
        yield np.stack(expected), np.stack(got)


def _context(model: OnnxModel, generation: Generation, batch: int, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random values in the place of an encoder's; a mask hides the end of all but the first sequence."""
    specs, found = {spec.name: spec for spec in model.inputs}, {}
    for name in generation.names.context:
        _, *axes = specs[name].shape
        shape = [batch, *(axis if isinstance(axis, int) else _CONTEXT for axis in axes)]
        array = draw.standard_normal(shape)
        if not specs[name].dtype.startswith(("float", "bfloat")):
            array = np.ones(shape)
            array[1:, -2:] = 0
        found[name] = array.astype(numpy_dtype(specs[name].dtype))
    return found
