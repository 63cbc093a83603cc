"""`Embedder`: a vector of each text, by an artifact whose graph pools the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.errors import UsageError

# Texts and places of one call: more make no call faster, and take memory.
ROWS, PLACES = 32, 4096
# Tokens that two texts of one call may always differ by.
_NEAR = 4
_IDS, _MASK = "input_ids", "attention_mask"
_FIELDS = {_IDS: "ids", _MASK: "attention_mask", "token_type_ids": "type_ids"}

Arrays = Mapping[str, np.ndarray]


class Embedder:
    """Tokenises texts and runs them in batches of similar lengths; `run` is of the artifact's module.

    Raises `UsageError`: the artifact makes no vector of each text, or has sizes that are not free.
    """

    def __init__(self, manifest: Manifest, run: Callable[[Arrays], Arrays], tokenizer: Any) -> None:
        inputs = {spec.name: spec for spec in manifest.inputs}
        if not inputs.keys() <= _FIELDS.keys() or _IDS not in inputs or len(manifest.outputs[0].shape) != 2:
            raise UsageError(
                f"the artifact of {manifest.model} makes no vector of each text: expected inputs of "
                f"{', '.join(_FIELDS)} and one output [batch, width]; compile the folder of an embedding model"
            )
        batch, tokens = axes = inputs[_IDS].shape
        if not (isinstance(batch, str) and isinstance(tokens, str)):
            raise UsageError(
                f"the artifact of {manifest.model} takes token ids {axes[0]}x{axes[1]} alone; compile the model with "
                "free axes (without --dim and --shape) to embed texts of any length"
            )
        self._inputs = {name: spec.dtype for name, spec in inputs.items()}
        self._run, self._tokenizer = run, tokenizer
        self._output = manifest.outputs[0]
        self._rows = min(ROWS, _most(manifest, batch) or ROWS)
        own = (tokenizer.truncation or {}).get("max_length")
        #: The most tokens of a text, None without a limit; longer ones are cut.
        self.max_tokens: int | None = min(filter(None, (own, _most(manifest, tokens))), default=None)
        self._pad = (tokenizer.padding or {}).get("pad_id", 0)
        tokenizer.no_padding()
        if self.max_tokens is not None:
            tokenizer.enable_truncation(self.max_tokens)

    @property
    def width(self) -> int:
        """The length of a vector."""
        return int(self._output.shape[1])

    def tokenise(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the inputs of one call for texts, padded on the right to the longest."""
        return self._padded(self._tokenizer.encode_batch_fast(list(texts)))

    def run(self, inputs: Arrays) -> np.ndarray:
        """Return a vector for each row of what `tokenise` returned, without the padding that a call does not need."""
        rows, longest = inputs[_IDS].shape
        lengths = np.maximum(inputs[_MASK].sum(axis=1), 1).tolist() if _MASK in inputs else [longest] * rows
        return self._vectors(
            lengths, lambda rows: {name: array[rows, : lengths[rows[0]]] for name, array in inputs.items()}
        )

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, width], in the order of the texts."""
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        lengths = [len(one.ids) for one in encodings]
        return self._vectors(lengths, lambda rows: self._padded([encodings[row] for row in rows]))

    def _vectors(self, lengths: Sequence[int], inputs: Callable[[list[int]], Arrays]) -> np.ndarray:
        vectors = np.empty((len(lengths), self.width), np.float32)
        for rows in self._batches(lengths):
            vectors[rows] = self._run(inputs(rows))[self._output.name]
        return vectors

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the texts of each call, longest first."""
        rows: list[int] = []
        for row in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
            longest = lengths[rows[0]] if rows else lengths[row]
            full = len(rows) == self._rows or (len(rows) + 1) * longest > PLACES
            # At most a quarter of a call is padding.
            if rows and (full or longest - lengths[row] > max(longest // 4, _NEAR)):
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _padded(self, encodings: Sequence[Any]) -> dict[str, np.ndarray]:
        # A text of no tokens has one that the mask hides.
        shape = (len(encodings), max([1, *(len(one.ids) for one in encodings)]))
        arrays = {}
        for name, dtype in self._inputs.items():
            array = np.full(shape, self._pad if name == _IDS else 0, dtype)
            for row, one in zip(array, encodings, strict=True):
                row[: len(one.ids)] = getattr(one, _FIELDS[name])
            arrays[name] = array
        return arrays


def _most(manifest: Manifest, axis: str) -> int | None:
    """Return the largest size of an axis, None without one."""
    bounds = [
        int(one.size) for one in manifest.limits or () if (one.axis, one.sign) == (axis, "<=") and one.size.isdecimal()
    ]
    return min([*bounds, *([manifest.maxima[axis]] if axis in manifest.maxima else [])], default=None)
