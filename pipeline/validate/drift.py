"""How far an artifact is from the float32 original: the price of its precision, apart from whether it is right.

Validation asks whether the compiled code computes what its precision says (for quantised weights: of the quantised
weights). Drift is the distance from the model as given, computed by ONNX Runtime in float32, in the measures that
matter for the kind of an output:

- logits: how often the largest one is in the same place, and the Kullback-Leibler divergence, in nats, of the
  distributions softmax(original) and softmax(ours) over the last axis;
- embeddings (every other float output): the cosine of each vector along the last axis with the original's;
- of a file of token ids: the perplexity of both, exp of the mean of -log p(next token).

An output is taken for logits when its name has "logit" in it, or when its last axis is as long as the vocabulary that
an input of ids indexes; a name given by hand decides instead. The report names and hashes the inputs.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaxtune.models import OnnxModel
from relaxtune.models.files import read_regular
from relaxtune.models.inputs import InputKind, describe_inputs, unpadded_inputs
from relaxtune.pipeline.arrays import CHUNK, map_chunks
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.validate.report import DataSource, DriftOptions, OutputDrift, Perplexity

Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]

LOGITS, EMBEDDING = "logits", "embedding"


def measure_drift(
    model: OnnxModel,
    original: Sequence[Mapping[str, np.ndarray]],
    got: Sequence[Mapping[str, np.ndarray]],
    logits: Sequence[str] = (),
) -> tuple[OutputDrift, ...]:
    """Return the drift of each float output over samples.

    Outputs that only one side has, or in another shape, are left out: validation reports them. `logits` are names of
    outputs; empty to find them.
    Raises `UsageError`: a name is no output of the model.
    """
    chosen = logits_of(model, logits)
    found = []
    for spec in model.outputs:
        name = spec.name
        pairs = [(a[name], b[name]) for a, b in zip(original, got, strict=True) if name in a and name in b]
        pairs = [(a, b) for a, b in pairs if a.shape == b.shape and a.size and _is_float(a) and _is_float(b)]
        if pairs:
            found.append(_output_drift(name, LOGITS if name in chosen else EMBEDDING, pairs))
    return tuple(found)


def logits_of(model: OnnxModel, chosen: Sequence[str] = ()) -> frozenset[str]:
    """Return the names of the outputs that are logits: those chosen, else those found as the module's docstring says.

    Raises `UsageError`: a chosen name is no output of the model.
    """
    names = [spec.name for spec in model.outputs]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise UsageError(f"{model.name} has no output {', '.join(map(repr, unknown))}; expected {', '.join(names)}")
    if chosen:
        return frozenset(chosen)
    # Tables of token types have two rows; a class or a head could be mistaken for so small a vocabulary.
    vocabularies = {rule.high for rule in describe_inputs(model) if rule.kind is InputKind.INDEX and rule.high > 256}
    return frozenset(
        spec.name
        for spec in model.outputs
        if "logit" in spec.name.lower() or (len(spec.shape) >= 2 and spec.shape[-1] in vocabularies)
    )


def inputs_source(inputs: Sequence[Mapping[str, np.ndarray]], seed: int) -> DataSource:
    """Return the name and hash of random inputs."""
    digest = hashlib.sha256()
    for sample in inputs:
        for name in sorted(sample):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(sample[name]).tobytes())
    return DataSource(f"random inputs, seed {seed}", digest.hexdigest(), len(inputs))


def read_tokens(path: Path) -> tuple[np.ndarray, DataSource]:
    """Return token ids of a `.npy` file of integers, or of a text file with numbers between white space.

    Raises `UsageError`: the file cannot be read, or holds something else.
    """
    try:
        data = read_regular(path)
        read = io.BytesIO(data)
        array = np.load(read, allow_pickle=False) if path.suffix == ".npy" else np.array(data.split(), dtype=np.int64)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise UsageError(
            f"--tokens {path} cannot be read ({error}); expected a .npy file of integers, or text with token ids "
            "between white space"
        ) from error
    if array.dtype.kind not in "iu" or array.size == 0:
        raise UsageError(f"--tokens {path} holds {array.size} values of {array.dtype}; expected token ids (integers)")
    ids = array.astype(np.int64).ravel()
    return ids, DataSource(path.name, hashlib.sha256(data).hexdigest(), int(ids.size))


def measure_perplexity(
    model: OnnxModel, original: Run, ours: Run, options: DriftOptions, dims: Mapping[str, int]
) -> Perplexity:
    """Return the perplexities of a file of tokens, cut into sequences as long as the model's (the rest is left out).

    Raises `UsageError`: the file has fewer tokens than a sequence or tokens outside the vocabulary, or the model is
    none that gives logits [batch, sequence, vocabulary] for ids [batch, sequence].
    """
    assert options.tokens is not None
    ids, source = read_tokens(options.tokens)
    filled = unpadded_inputs(model, seed=0, dims=dims)
    name, vocabulary = _ids_input(model, filled)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise UsageError(
            f"--tokens {options.tokens}: ids from {low} to {high}, the vocabulary of {model.name} has {vocabulary}"
        )
    batch, length = filled[name].shape
    count = ids.size // length
    if length < 2 or not count:
        raise UsageError(
            f"--tokens {options.tokens} has {ids.size} ids; {model.name} reads sequences of {length}: "
            "one sequence of 2 or more ids must fit"
        )
    sequences = ids[: count * length].reshape(count, length)
    logits = _logits_output(model, options, (batch, length, vocabulary))
    totals = np.zeros(2)
    for start in range(0, len(sequences), batch):
        rows = sequences[start : start + batch]
        kept = len(rows)
        # The last run is filled up with its last sequence.
        rows = np.concatenate([rows, np.repeat(rows[-1:], batch - kept, axis=0)])
        feeds = {**filled, name: rows.astype(filled[name].dtype)}
        totals += [_negative_log_likelihood(run(feeds)[logits], rows, kept) for run in (original, ours)]
    predicted = count * (length - 1)
    # A perplexity too large for a float is infinite.
    values = [math.exp(total / predicted) if total / predicted < 700 else math.inf for total in totals]
    return Perplexity(source, values[0], values[1], predicted)


def _output_drift(name: str, kind: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> OutputDrift:
    max_abs = max_rel = 0.0
    broken = 0
    cosines: list[float] = []
    parts: list[_Part] = []
    for expected, got in pairs:
        own = _parts(expected, got, logits=kind == LOGITS)
        broken += sum(part.broken for part in own)
        error = max(part.max_abs for part in own)
        wanted, found, product = (sum(part.products[at] for part in own) for at in range(3))
        size = math.sqrt(wanted / expected.size)
        max_abs, max_rel = max(max_abs, error), max(max_rel, error / size if size > 0 else 0.0)
        if wanted > 0 and found > 0:
            cosines.append(product / (math.sqrt(wanted) * math.sqrt(found)))
        parts += own if expected.ndim else []
    row = np.concatenate([part.cosines for part in parts] or [np.zeros(0)])
    agreements = np.concatenate([part.agreements for part in parts] or [np.zeros(0)])
    divergence = np.concatenate([part.divergences for part in parts] or [np.zeros(0)])
    return OutputDrift(
        name=name,
        kind=kind,
        max_abs=max_abs,
        max_rel=max_rel,
        cosine=min(cosines) if cosines else None,
        row_cosine_mean=float(np.mean(row)) if row.size else None,
        row_cosine_min=float(np.min(row)) if row.size else None,
        argmax_agreement=float(np.mean(agreements)) if agreements.size else None,
        kl_mean=float(np.mean(divergence)) if divergence.size else None,
        kl_max=float(np.max(divergence)) if divergence.size else None,
        broken=broken,
    )


@dataclass(frozen=True)
class _Part:
    """Errors of some rows of an output; `products` are those of the original and ours with themselves and both.

    `cosines`, `agreements` and `divergences` are of each row, the last two of logits only.
    """

    broken: int
    max_abs: float
    products: tuple[float, float, float]
    cosines: np.ndarray
    agreements: np.ndarray
    divergences: np.ndarray


def _parts(expected: np.ndarray, got: np.ndarray, *, logits: bool) -> list[_Part]:
    """Return what an output is off by, a few rows at a time: they stay in a core's cache, on several threads."""
    width = expected.shape[-1] if expected.ndim else 1
    rows = expected.reshape(-1, width), got.reshape(-1, width)

    def look(begin: int, end: int) -> _Part:
        wanted, found = (one[begin:end].astype(np.float64) for one in rows)
        finite = np.isfinite(wanted)
        both = finite & np.isfinite(found)
        broken = int(np.count_nonzero(finite & ~both))
        if not both.all():
            wanted, found = np.where(both, wanted, 0.0), np.where(both, found, 0.0)
        pairs = (wanted, wanted), (found, found), (wanted, found)
        own, others, product = (float(np.einsum("ij,ij->", *pair)) for pair in pairs)
        none = divergences = np.zeros(0)
        if logits:
            # KL(original || ours) of each row in nats, at least 0.
            p, q = _log_softmax(wanted), _log_softmax(found)
            divergences = np.maximum(np.sum(np.exp(p) * (p - q), axis=-1), 0.0)
        lengths = np.linalg.norm(wanted, axis=-1) * np.linalg.norm(found, axis=-1)
        # Rows of zeros have no direction.
        whole = lengths > 0
        return _Part(
            broken,
            float(np.max(np.abs(wanted - found), initial=0.0)),
            (own, others, product),
            np.einsum("ij,ij->i", wanted[whole], found[whole]) / lengths[whole],
            np.argmax(wanted, axis=-1) == np.argmax(found, axis=-1) if logits else none,
            divergences,
        )

    return map_chunks(look, len(rows[0]), max(1, CHUNK // width))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return result


def _ids_input(model: OnnxModel, filled: Mapping[str, np.ndarray]) -> tuple[str, int]:
    """Return the input of token ids [batch, sequence] and the size of its vocabulary: the largest table indexed."""
    found = [
        (rule.high, rule.name)
        for rule in describe_inputs(model)
        if rule.kind is InputKind.INDEX and filled[rule.name].ndim == 2
    ]
    if not found:
        raise UsageError(f"{model.name} has no input of token ids [batch, sequence]; leave --tokens out")
    vocabulary, name = max(found)
    return name, vocabulary


def _logits_output(model: OnnxModel, options: DriftOptions, shape: tuple[int, int, int]) -> str:
    names = sorted(logits_of(model, options.logits))
    for spec in model.outputs:
        fits = len(spec.shape) == 3 and spec.shape[-1] in (shape[-1], *(a for a in spec.shape if isinstance(a, str)))
        if spec.name in names and fits:
            return spec.name
    raise UsageError(
        f"{model.name} has no output of logits [batch, sequence, vocabulary] = {shape}; found logits: "
        f"{', '.join(names) or 'none'}. Perplexity needs a model of next tokens; leave --tokens out, or name "
        "the output with --logits"
    )


def _negative_log_likelihood(logits: np.ndarray, rows: np.ndarray, kept: int) -> float:
    """Return the sum of -log p of each token after the first, of the sequences that count."""
    total = 0.0
    for row in range(kept):
        predicted = _log_softmax(logits[row, :-1].astype(np.float64))
        total -= float(np.sum(np.take_along_axis(predicted, rows[row, 1:, None], axis=-1)))
    return total


def _is_float(array: np.ndarray) -> bool:
    # bfloat16 is of kind V in NumPy.
    return array.dtype.kind in "fV"
