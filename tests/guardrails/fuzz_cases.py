"""What is fuzzed: five artifacts with symbolic axes, and how the shapes, masks and values of a case are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relaxtune.models import OnnxModel
from relaxtune.models.inputs import InputKind, describe_inputs, random_inputs

# Edges, primes, and the tiles of CPU schedules (vectors of 16, register tiles, blocks of 64), one less and one more.
BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 13)
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 11, 13, 15, 16, 17, 23, 31, 32, 33, 37, 47, 48, 49, 61, 63, 64, 65, 97)
LONG_LENGTHS = (127, 128, 129, 191, 255, 256, 257)
MASKS = ("right", "left", "ragged", "ones", "one left", "no row", "a row of none", "none")
VALUES = ("usual", "large", "tiny", "zeros", "infinite", "nan")
# Chance of a long sentence: it costs as much as twenty others.
_LONG = 0.03
_MASK_KINDS = frozenset({InputKind.MASK, InputKind.ADDITIVE_MASK})
_FLOAT_KINDS = frozenset({InputKind.REAL, InputKind.CACHE})


@dataclass(frozen=True)
class Fuzzed:
    """A zoo model with symbolic axes: the shape of one input that names them, and the longest `length`.

    In a `causal` one a token before the first that the mask keeps sees no key.
    """

    model: str
    shapes: Mapping[str, tuple[int | str, ...]]
    length: str
    longest: int
    causal: bool = False


ARTIFACTS = (
    Fuzzed("bert-tiny", {"input_ids": ("batch", "sequence")}, "sequence", 512),
    Fuzzed("gpt2-tiny", {"input_ids": ("batch", "sequence")}, "sequence", 512, causal=True),
    Fuzzed("t5-tiny", {"input_ids": ("batch", "sequence")}, "sequence", 512),
    Fuzzed(
        "llama-tiny-decode",
        {"input_ids": ("batch", 1), "past_key_values.0.key": ("batch", 2, "past_sequence", 32)},
        "past_sequence",
        511,
    ),
    Fuzzed("vit-tiny", {"pixel_values": ("batch", 3, 32, 32)}, "", 0),
)


@dataclass(frozen=True)
class FuzzCase:
    """One call of an artifact: sizes of its axes, how its masks and its float inputs are filled, and the seed."""

    model: str
    batch: int
    length: int
    mask: str
    values: str
    seed: int

    def __str__(self) -> str:
        """Return the case in words, for messages."""
        return (
            f"{self.model}, batch {self.batch}, length {self.length}, mask {self.mask!r}, values {self.values!r}, "
            f"seed {self.seed}"
        )


def draw_cases(
    fuzzed: Fuzzed, count: int, seed: int, masks: Sequence[str] = MASKS, values: Sequence[str] = VALUES
) -> list[FuzzCase]:
    """Return `count` cases of one artifact: the longest first, then edges and tiles at random, always the same."""
    rng = np.random.default_rng([seed, *fuzzed.model.encode()])
    cases = []
    for number in range(count):
        lengths = LONG_LENGTHS if rng.random() < _LONG else LENGTHS
        drawn = int(rng.choice([size for size in lengths if size <= fuzzed.longest] or [0]))
        length = fuzzed.longest if number == 0 else drawn
        batch = 1 if length > max(LENGTHS) else int(rng.choice(BATCHES))
        cases.append(FuzzCase(fuzzed.model, batch, length, str(rng.choice(masks)), str(rng.choice(values)), number))
    return cases


def dims_of(case: FuzzCase, fuzzed: Fuzzed) -> dict[str, int]:
    """Return the sizes of the artifact's symbolic axes in a case."""
    return {"batch": case.batch} | ({fuzzed.length: case.length} if fuzzed.length else {})


def make_inputs(case: FuzzCase, fuzzed: Fuzzed, model: OnnxModel) -> dict[str, np.ndarray]:
    """Return the inputs of a case by name."""
    inputs = random_inputs(model, seed=case.seed, dims=dims_of(case, fuzzed))
    rng = np.random.default_rng([case.seed, 1])
    for rule in describe_inputs(model):
        given = inputs[rule.name]
        if rule.kind in _MASK_KINDS:
            inputs[rule.name] = _mask(case.mask, given.shape, rng).astype(given.dtype)
        elif rule.kind in _FLOAT_KINDS:
            inputs[rule.name] = _values(case.values, given, rng)
    return inputs


def _mask(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return a mask of zeros (padding) and ones."""
    rows, length = shape
    kept = rng.integers(1, length + 1, rows)
    places = np.arange(length)[None]
    match kind:
        case "right":
            return places < kept[:, None]
        case "left":
            return places >= length - kept[:, None]
        case "ragged":
            return rng.integers(0, 2, shape)
        case "ones":
            return np.ones(shape)
        case "one left":
            return places == kept[:, None] - 1
        case "a row of none":
            return np.where(np.arange(rows)[:, None] == rows - 1, 0, places < kept[:, None])
        case "no row":
            return np.where(np.arange(rows)[:, None] == 0, 1, 0) * np.ones(shape)
        case _:
            return np.zeros(shape)


def _values(kind: str, given: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return float values of a kind, a few of them not finite for the last two."""
    values = given.copy()
    few = rng.random(given.shape) < 2 / max(given.size, 1)
    if few.size:
        few.flat[int(rng.integers(few.size))] = True
    match kind:
        case "large":
            return np.asarray(values * 1e4, given.dtype)
        case "tiny":
            return np.asarray(values * 1e-30, given.dtype)
        case "zeros":
            return np.zeros_like(values)
        case "infinite":
            values[few] = np.inf * np.sign(rng.standard_normal(int(few.sum())))
        case "nan":
            values[few] = np.nan
    return values
