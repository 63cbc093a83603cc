"""What the families of exports share: sample inputs, wrappers that turn a model's answer into a tuple of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import transformers as tf

# Two of each: torch.export takes a size of one for a constant, and TorchScript records what it saw.
BATCH, SEQUENCE, PAST = 2, 16, 12
VOCABULARY = 128
LAYERS, HEADS = 2, 4
_NEW = 3

Tensors = dict[str, torch.Tensor]
Axes = dict[str, dict[int, str]]
Call = Callable[[torch.nn.Module, Tensors], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Family:
    """How to build one model and what of it is exported.

    Attributes
    ----------
    build
        Makes the model of a hidden size, with random weights.
    inputs
        Sample inputs by name, in the order of the graph's inputs.
    outputs
        Names of the graph's outputs, in order.
    call
        Runs the model on inputs by name and returns the outputs.
    axes
        Names of the symbolic axes of a symbolic export; by default what `text_axes` says of the inputs.
    real
        Whether the weights are a trained model's, which are left as they are.
    """

    build: Callable[[int], torch.nn.Module]
    inputs: Callable[[torch.nn.Module], Tensors]
    outputs: tuple[str, ...] = ("last_hidden_state",)
    call: Call | None = None
    axes: Callable[[Tensors], Axes] | None = None
    real: bool = False

    def symbolic_axes(self, inputs: Tensors) -> Axes:
        """Return the names of the symbolic axes of each input."""
        return (self.axes or text_axes)(inputs)

    def answer(self, model: torch.nn.Module, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        """Return the model's outputs on inputs by name."""
        if self.call is not None:
            return self.call(model, inputs)
        result = model(**inputs)
        return tuple(getattr(result, name) for name in self.outputs)


class Wrapper(torch.nn.Module):
    """A model whose forward takes tensors by position and returns a tuple of them: what torch.onnx exports best."""

    def __init__(self, model: torch.nn.Module, family: Family, names: list[str]) -> None:
        super().__init__()
        self.model, self.family, self.names = model, family, names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.family.answer(self.model, dict(zip(self.names, tensors, strict=True)))


def text_inputs(model: torch.nn.Module) -> Tensors:
    """Token ids in range, and a mask with padding at the end of the sentence."""
    del model
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[:, -3:] = 0
    return {"input_ids": torch.randint(2, VOCABULARY, (BATCH, SEQUENCE)), "attention_mask": mask}


def text_axes(inputs: Tensors) -> Axes:
    """Batch for every input; for token ids and masks the sequence too."""
    return {name: {0: "batch"} | ({1: "sequence"} if tensor.ndim == 2 else {}) for name, tensor in inputs.items()}


def batch_axes(inputs: Tensors) -> Axes:
    """Batch for every input and nothing else: images, whose sizes the position table fixes."""
    return {name: {0: "batch"} for name in inputs}


def decode_inputs(model: torch.nn.Module) -> Tensors:
    """One new token after `PAST` tokens in the cache, the first two of which are padding."""
    mask = torch.ones(BATCH, PAST + 1, dtype=torch.int64)
    mask[:, :2] = 0
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    caches = {
        f"past_key_values.{layer}.{part}": torch.randn(BATCH, heads, PAST, size)
        for layer in range(config.num_hidden_layers)
        for part in ("key", "value")
    }
    return {"input_ids": torch.randint(2, VOCABULARY, (BATCH, 1)), "attention_mask": mask, **caches}


def decode_axes(inputs: Tensors) -> Axes:
    """Batch and the length of the cache, which the mask counts together with the new token."""
    own = {"input_ids": {0: "batch"}, "attention_mask": {0: "batch", 1: "past_sequence + 1"}}
    return {name: own.get(name, {0: "batch", 2: "past_sequence"}) for name in inputs}


def decode_call(model: torch.nn.Module, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Return the logits and the grown caches of every layer."""
    cache = tf.DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        cache.update(inputs[f"past_key_values.{layer}.key"], inputs[f"past_key_values.{layer}.value"], layer)
    result = model(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], past_key_values=cache, use_cache=True
    )
    return (result.logits, *cached(result.past_key_values))


def optimum_step(family: Family) -> Family:
    """Return a decoder's step as Optimum exports it: several new tokens, and its names of inputs and axes."""

    def inputs(model: torch.nn.Module) -> Tensors:
        caches = {name: tensor for name, tensor in family.inputs(model).items() if name.startswith("past_")}
        mask = torch.ones(BATCH, PAST + _NEW, dtype=torch.int64)
        mask[:, :2] = 0
        return {"input_ids": torch.randint(2, VOCABULARY, (BATCH, _NEW)), "attention_mask": mask, **caches}

    def axes(inputs: Tensors) -> Axes:
        own = {
            "input_ids": {0: "batch_size", 1: "sequence_length"},
            "attention_mask": {0: "batch_size", 1: "past_sequence_length + sequence_length"},
        }
        return {name: own.get(name, {0: "batch_size", 2: "past_sequence_length"}) for name in inputs}

    return replace(family, inputs=inputs, axes=axes)


def cached(cache: tf.DynamicCache) -> tuple[torch.Tensor, ...]:
    """Return keys and values of every layer of a cache, in turn."""
    return tuple(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


def prefill_call(model: torch.nn.Module, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Return the logits and the caches that the decode step starts from."""
    result = model(**inputs, use_cache=True)
    return (result.logits, *cached(result.past_key_values))


def cache_outputs(layers: int = LAYERS) -> tuple[str, ...]:
    """Return the names of logits and present caches."""
    return ("logits", *(f"present.{layer}.{part}" for layer in range(layers) for part in ("key", "value")))


def decoder(build: Callable[[int], torch.nn.Module]) -> Family:
    """Return the family of a decoder that reads a whole sentence and answers with logits."""
    return Family(build, text_inputs, ("logits",), lambda model, inputs: (model(**inputs, use_cache=False).logits,))


def decode_step(build: Callable[[int], torch.nn.Module]) -> Family:
    """Return the family of a decoder's step: one token, caches in and out."""
    return Family(build, decode_inputs, cache_outputs(), decode_call, decode_axes)


def prefill(build: Callable[[int], torch.nn.Module]) -> Family:
    """Return the family of a decoder's first step: a sentence in, logits and caches out."""
    return Family(build, text_inputs, cache_outputs(), prefill_call)


Families = Mapping[str, Family]
