"""The signature of a model: names, dtypes, shapes and limits of its inputs and outputs, how a decoder generates.

Needs no ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from relaxtune.models.dims import evaluate_dim

# Files beside a model that its artifact carries, as the hub calls them.
TOKENIZER_FILE, GENERATION_FILE = "tokenizer.json", "generation_config.json"
# A step of generation: its inputs before the caches, its first output, and the axis of the positions that it looks at.
TOKENS, POSITION, PLACE, PADDING, HISTORY = "tokens", "position", "place", "padding", "history"
SAMPLING, SEED, COUNTS = "sampling", "seed", "counts"
LOGITS = "logits"
VISIBLE = "visible"


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of a `TensorSpec.dtype`, bfloat16 and float8 included."""
    extension = getattr(ml_dtypes, name, None)
    return np.dtype(extension if extension is not None else name)


def shape_text(shape: Sequence[int | str]) -> str:
    """Return `1x128`, or `batch x 128` where an axis has a name."""
    return ("x" if all(isinstance(axis, int) for axis in shape) else " x ").join(map(str, shape))


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (numpy's name) and shape of an input or output; a `str` axis is symbolic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def is_static(self) -> bool:
        """Whether every axis is a number."""
        return all(isinstance(axis, int) for axis in self.shape)

    def __str__(self) -> str:
        """Return `name: dtype[1x128]`, with commas where an axis has a name."""
        return f"{self.name}: {self.dtype}[{shape_text(self.shape)}]"


@dataclass(frozen=True)
class AxisRelation:
    """A demand of a graph on an axis."""

    axis: str  # Name of the axis, as the file has it; a sum of names where only the sum is bounded.
    sign: str  # "=", ">=" or "<=".
    size: str  # A number, or a sum of products of other axes' names.
    where: tuple[str, ...] = ()  # The axes of inputs with that name, such as `attention_mask[1]`.
    table: str = field(default="", compare=False)  # The source of a bound: a table by its name, or the node that reads.

    @property
    def multiple(self) -> int | None:
        """The number that the axis has to be a multiple of; None where the relation is another."""
        number, _, rest = self.size.partition(" * ")
        return int(number) if self.sign == "<=" and rest == f"({self.axis} // {number})" else None

    def __str__(self) -> str:
        """Return `total (attention_mask[1]) = past + sequence`, and what sets it."""
        where = f" ({', '.join(self.where)})" if self.where else ""
        demand = f"{self.sign} {self.size}" if self.multiple is None else f"is a multiple of {self.multiple}"
        return f"{self.axis}{where} {demand}{f', by {self.table}' if self.table else ''}"

    def problem(self, sizes: Mapping[str, int]) -> str | None:
        """Return how a bound is broken by the sizes of axes; None where it is kept, or where sizes are missing."""
        size, bound = evaluate_dim(self.axis, sizes), evaluate_dim(self.size, sizes)
        least = self.sign == ">="
        if self.sign == "=" or isinstance(size, str) or isinstance(bound, str):
            return None
        if (size >= bound) if least else (size <= bound):
            return None
        if self.multiple is not None:
            return f"axis {self.axis!r} has size {size}, {self.table or 'the graph'} takes multiples of {self.multiple}"
        limit = f"{bound} or more" if least else f"{bound} at most"
        bounded = f" ({self.size})" if self.size != str(bound) else ""
        return f"axis {self.axis!r} has size {size}, {self.table or 'the graph'} takes {limit}{bounded}"


@dataclass(frozen=True)
class IndexLimit:
    """The integers that an input may hold, `least` to `most`: places of a table, negative ones from its end."""

    input: str
    least: int
    most: int
    rows: int  # Of the table.
    table: str  # Its name, and the node that looks up.

    def problem(self, values: np.ndarray) -> str | None:
        """Return which value is outside of the table; None where none is."""
        if not values.size:
            return None
        low, high = int(values.min()), int(values.max())
        if low >= self.least and high <= self.most:
            return None
        return (
            f"input {self.input!r} has the value {low if low < self.least else high}, {self.table} has {self.rows} "
            f"rows and takes {self.least} to {self.most}"
        )


@dataclass(frozen=True)
class DecoderNames:
    """Names of a decoder's inputs and outputs, as its file has them."""

    tokens: str
    mask: str | None
    positions: str | None
    logits: str
    caches: tuple[tuple[str, str], ...]  # Each as input and as output.
    inputs: tuple[TensorSpec, ...]  # Its whole signature.
    context: tuple[str, ...] = ()  # Inputs that an encoder gives, the same for all tokens of a sequence.


@dataclass(frozen=True)
class Generation:
    """A step of generation: its sizes, names and limits.

    Inputs are `tokens` [batch, new], the state (`state`), what an encoder gives (`names.context`), then caches
    [visible, batch, heads, width]. Outputs are the logits of the last new token and the position after it. `place` is
    the position plus 1, for each sequence.
    """

    capacity: int  # Tokens that a sequence may have, the prompt's among them.
    vocabulary: int
    # Names of the axes; a number where the model has one size only.
    batch: str | int
    new: str | int
    names: DecoderNames
    start: int | None = None  # The token that a decoder behind an encoder begins with.

    @property
    def state(self) -> dict[str, tuple[tuple[int | str, ...], str]]:
        """Shape and dtype of the inputs that a step has between its tokens and its caches."""
        one, index = (self.batch,), "int64"
        return {
            **{POSITION: ((1,), index), PLACE: (one, index), PADDING: (one, index)},
            HISTORY: ((self.capacity + 1, self.batch), index),
            **{SAMPLING: ((self.batch, 8), "float32"), SEED: (one, index)},
            COUNTS: ((self.batch, self.vocabulary), "int32"),
        }

    @property
    def pads(self) -> bool:
        """Whether sequences of several lengths may be one batch: the model has a mask."""
        return self.names.mask is not None
