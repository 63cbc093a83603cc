"""`Generator`: the state of a generation, and the steps that update it in place; `Sampling` says how tokens are drawn.

Caches, position and tokens lie on the device from the first step to the last; a step copies none of them. A GPU is
given several steps at a time: each takes its token from the one before, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields

import numpy as np
from tvm_ffi import Device, Tensor

from relaxtune.models.dims import evaluate_dim
from relaxtune.models.spec import (
    COUNTS,
    HISTORY,
    PADDING,
    PLACE,
    POSITION,
    SAMPLING,
    SEED,
    VISIBLE,
    Generation,
    TensorSpec,
    numpy_dtype,
)
from relaxtune.pipeline.artifact.gpu.turns import Turns, on_default_stream
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tvm_runtime.library import array_of, fill, is_cpu, tensor_of, view

# Tokens of a prompt that one step takes, steps that a GPU is given at a time, and what the number of positions that a
# step looks at is rounded up to, so that few sizes come.
CHUNK, AHEAD, _GRAIN = 512, 8, 64

# Of `schedules.functions.sampling`.
_PROMPT_BIT = -(2**31)
# Field -> the least and the largest value.
_RANGES = {"top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "typical_p": (0.0, 1.0), "temperature": (0.0, 1e6)}

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; by default it is the one with the largest logit.

    Filters and penalties mean what they mean in transformers: penalties change the logits first, then the temperature,
    then top-k, top-p, min-p and typical each keep some of the tokens that are left. At temperature 0 no filter matters.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all.
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    # A factor against tokens of prompt and text; numbers off the logits of tokens of the text, once, and each time.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # Of the first sequence of a batch; the next one has the next number.

    def __post_init__(self) -> None:
        """Refuse what no token can be drawn by."""
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}; expected {least:g} to {most:g}")
        if self.repetition_penalty <= 0 or self.top_k < 0:
            got = f"{self.repetition_penalty} and {self.top_k}"
            raise UsageError(f"expected repetition_penalty above 0 and top_k of 0 or more, got {got}")

    @property
    def parameters(self) -> tuple[float, ...]:
        """The columns of the tensor that a step reads (`schedules.functions.sampling.PARAMETERS`)."""
        return astuple(self)[: len(fields(self)) - 1]

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens there were."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


GREEDY = Sampling()


@dataclass(frozen=True)
class Step:
    """A step as code; `sizes` are the axes that it is compiled for, all others are free."""

    sizes: Mapping[str, int]
    # Returns a function of no arguments that runs with some inputs, which stay where they are.
    bind: Callable[[Sequence[Tensor]], Callable[[], Outputs]]


@dataclass
class _State:
    """The tensors of one batch, and how many tokens each of its sequences has; `next` is the last one [batch, 1]."""

    batch: int
    next: Tensor
    kept: dict[str, Tensor]
    context: dict[str, Tensor] = field(default_factory=dict)  # Outputs of the encoder.
    position: int = 0
    # (place of a step, positions that it looks at) -> a decode step on these tensors.
    decoding: dict[tuple[int, int], Callable[[], Outputs]] = field(default_factory=dict)


class Generator:
    """Generates tokens with the steps of an artifact, the one of any sizes first; one batch at a time."""

    def __init__(
        self, generation: Generation, inputs: Sequence[TensorSpec], steps: Sequence[Step], device: Device, turns: Turns
    ) -> None:
        self.generation = generation
        first = 1 + len(generation.state)
        self._context = dict(zip(generation.names.context, inputs[first:], strict=False))
        self._caches = inputs[first + len(self._context) :]
        self._steps, self._device, self._turns = tuple(steps), device, turns
        self._states: dict[int, _State] = {}
        self._state: _State | None = None

    def check(
        self, prompts: Sequence[Sequence[int]], chunk: int, most: int | None, context: Mapping[str, np.ndarray]
    ) -> None:
        """Refuse what cannot be generated from.

        Raises
        ------
        UsageError
            See `Module.generate`.
        """
        generation = self.generation
        if not prompts or not all(prompts):
            raise UsageError("a prompt has no tokens; expected one at least, such as the token that begins a text")
        for prompt in prompts:
            if wrong := [token for token in prompt if not 0 <= token < generation.vocabulary]:
                raise UsageError(
                    f"token {wrong[0]} of a prompt is not in 0 to {generation.vocabulary - 1}, the vocabulary"
                )
        longest = max(map(len, prompts))
        if longest > generation.capacity:
            raise UsageError(
                f"a prompt has {longest} tokens, and the artifact's caches hold {generation.capacity}; shorten it, or "
                "compile the model with a larger --max-length"
            )
        if not generation.pads and min(map(len, prompts)) < longest:
            raise UsageError(
                "the prompts have several lengths, and the model has no mask to hide padding; give each alone"
            )
        if isinstance(generation.batch, int) and len(prompts) != generation.batch:
            raise UsageError(f"the model was exported for {generation.batch} sequences, got {len(prompts)} prompts")
        if found := {len(array) for array in context.values()} - {len(prompts)}:
            raise UsageError(f"{len(prompts)} prompts need as many inputs of the encoder, got {min(found)}")
        if chunk < 1 or (most is not None and most < 1):
            raise UsageError(f"expected 1 or more, got chunk={chunk} and max_new_tokens={most}")

    def start(
        self, padding: Sequence[int], sampling: Sampling = GREEDY, context: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Begin sequences, each with some places before its first token; `context` is what an encoder gave."""
        batch = len(padding)
        with on_default_stream(self._device), self._turns:
            state = self._state = self._states.get(batch) or self._new_state(batch)
            state.position = 0
            fill(state.kept[POSITION], np.zeros(1, np.int64))
            fill(state.kept[PLACE], np.ones(batch, np.int64))
            fill(state.kept[PADDING], np.asarray(padding, np.int64))
            fill(state.kept[SAMPLING], np.array([sampling.parameters] * batch, np.float32))
            fill(state.kept[SEED], sampling.seed + np.arange(batch))
            for name, spec in self._context.items():
                array = np.asarray((context or {})[name], numpy_dtype(spec.dtype), order="C")
                before = state.context.get(name)
                if before is not None and tuple(before.shape) == array.shape:
                    fill(before, array)
                else:
                    state.context[name] = tensor_of(array, self._device)
                    state.decoding.clear()

    def feed(self, ids: np.ndarray) -> Tensor:
        """Take the next tokens [batch, new] of all sequences; return the logits [batch, vocabulary] after them."""
        state, logits = self._require(), None
        width = ids.shape[1] if isinstance(self.generation.new, str) else self.generation.new
        with on_default_stream(self._device), self._turns:
            for start in range(0, ids.shape[1], width):
                part = np.ascontiguousarray(ids[:, start : start + width], np.int64)
                if part.shape[1] == 1:
                    fill(state.next, part)
                    logits = self._decode(state)
                    continue
                visible = self._visible(state.position + part.shape[1])
                inputs = self._inputs(state, visible, tensor_of(part, self._device))
                logits, _ = self._steps[0].bind(inputs)()
                state.position += part.shape[1]
                self._turns.copy(self._rows(state, state.position, 1, (state.batch, 1)), state.next)
        assert logits is not None
        return logits

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        most: int | None,
        stop: Sequence[tuple[int, ...]],
        chunk: int,
        sampling: Sampling = GREEDY,
        context: Mapping[str, np.ndarray] | None = None,
    ) -> Iterator[list[int | None]]:
        """Give the next token of each sequence, None behind its end."""
        length = max(map(len, prompts))
        room = self.generation.capacity - length
        ids = np.zeros((len(prompts), length), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[length - len(prompt) :] = prompt
        self.start([length - len(prompt) for prompt in prompts], sampling, context)
        if isinstance(self.generation.new, int):
            chunk = self.generation.new
        for start in range(0, length, chunk):
            if sampling.counts and start + chunk >= length:
                # Steps before the last one of a prompt have counted what they drew.
                counts = np.zeros((len(prompts), self.generation.vocabulary), np.int32)
                for in_prompt, prompt in zip(counts, prompts, strict=True):
                    in_prompt[np.asarray(prompt)] = _PROMPT_BIT
                with on_default_stream(self._device), self._turns:
                    fill(self._require().kept[COUNTS], counts)
            self.feed(ids[:, start : start + chunk])
        left = room + 1 if most is None else min(most, room + 1)
        ended, texts = [False] * len(prompts), [list[int]() for _ in prompts]
        state, count = self._require(), 1
        while left > 0:
            with on_default_stream(self._device), self._turns:
                rows = array_of(self._rows(state, state.position + 1 - count, count))
            for row in rows:
                yield [None if end else int(token) for end, token in zip(ended, row, strict=True)]
                for text, token in zip(texts, row, strict=True):
                    text.append(int(token))
                ends = [any(tuple(text[-len(one) :]) == one for one in stop) for text in texts]
                ended = [before or now for before, now in zip(ended, ends, strict=True)]
                if all(ended):
                    return
            left -= count
            count = min(left, 1 if is_cpu(self._device) else AHEAD)
            with on_default_stream(self._device), self._turns:
                for _ in range(count):
                    self._decode(state)

    def _require(self) -> _State:
        if self._state is None:
            raise UsageError("no sequence was begun; call start first")
        return self._state

    def _new_state(self, batch: int) -> _State:
        generation = self.generation
        sizes = {VISIBLE: generation.capacity, str(generation.batch): batch}
        caches = {spec.name: (spec.shape, spec.dtype) for spec in self._caches}
        # Places of the caches that are not written yet are read, and hidden: they may not be NaN.
        zeros = {
            name: np.zeros([int(evaluate_dim(axis, sizes)) for axis in shape], numpy_dtype(dtype))
            for name, (shape, dtype) in {**generation.state, **caches}.items()
        }
        # The CUDA graph of a step reads the tensors that it was captured with, as long as the artifact is loaded.
        captured = {step.sizes.get(str(generation.batch)) for step in self._steps if VISIBLE in step.sizes}
        self._states = {size: state for size, state in self._states.items() if size in captured}
        kept = {name: tensor_of(array, self._device) for name, array in zeros.items()}
        state = self._states[batch] = _State(batch, tensor_of(np.zeros((batch, 1), np.int64), self._device), kept)
        return state

    def _visible(self, tokens: int) -> int:
        capacity = self.generation.capacity
        if tokens > capacity:
            raise UsageError(
                f"the sequence would have {tokens} tokens, and the artifact's caches hold {capacity}; compile the "
                "model with a larger --max-length"
            )
        return min(-(-tokens // _GRAIN) * _GRAIN, capacity)

    def _inputs(self, state: _State, visible: int, tokens: Tensor) -> list[Tensor]:
        sizes = {VISIBLE: visible, str(self.generation.batch): state.batch}
        caches = [
            view(state.kept[spec.name], [int(evaluate_dim(axis, sizes)) for axis in spec.shape])
            for spec in self._caches
        ]
        kept = [state.kept[name] for name in self.generation.state]
        return [tokens, *kept, *(state.context[name] for name in self._context), *caches]

    def _decode(self, state: _State) -> Tensor:
        """Take the last token of each sequence; return the logits after it."""
        place, visible = self._decode_step(state)
        run = state.decoding.get((place, visible))
        if run is None:
            run = state.decoding[place, visible] = self._steps[place].bind(self._inputs(state, visible, state.next))
        logits, _ = run()
        state.position += 1
        if not self._takes_one(self._steps[place]):
            self._turns.copy(self._rows(state, state.position, 1, (state.batch, 1)), state.next)
        return logits

    def _takes_one(self, step: Step) -> bool:
        # Such a step writes the next token over its own.
        return step.sizes.get(str(self.generation.new), self.generation.new) == 1

    def _decode_step(self, state: _State) -> tuple[int, int]:
        """Return the place of the step that takes a token, and how many positions it looks at."""
        visible = self._visible(state.position + 1)
        found = [
            (step.sizes.get(VISIBLE, visible), place)
            for place, step in enumerate(self._steps)
            if self._takes_one(step)
            and step.sizes.get(str(self.generation.batch), state.batch) == state.batch
            and step.sizes.get(VISIBLE, visible) > state.position
        ]
        # The main step, which is the first, takes any sizes.
        least, place = min(found, key=lambda one: (one[0], -one[1]), default=(visible, 0))
        return place, least

    def _rows(self, state: _State, first: int, count: int, shape: Sequence[int] = ()) -> Tensor:
        return view(state.kept[HISTORY], shape or (count, state.batch), 8 * first * state.batch)
