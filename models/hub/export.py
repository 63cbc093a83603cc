"""Export a folder in the hub's layout to ONNX with free axes: `python -m relaxtune.models.hub.export FOLDER FILE`.

A process of its own runs it, since torch and TVM each bring an LLVM. The last line on stdout is a JSON object that
names the architecture and its task. Needs the extra `export`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from relaxtune.models.hub.pooling import read_pooling
from relaxtune.models.spec import TOKENIZER_FILE

_OPSET = 17
# Sizes of the sample call. TorchScript would take a size of 1 for a constant.
_BATCH, _TOKENS, _PAST, _SAMPLES = 2, 16, 12, 16_000

_PRESENT = "present."

Tensors = dict[str, torch.Tensor]


class ExportError(Exception):
    """The folder cannot be exported; the message is for the user."""


@dataclass(frozen=True)
class Sample:
    """A call of the model: its inputs by name with their free axes, and a function that returns outputs by name."""

    task: str
    inputs: Tensors
    axes: Mapping[str, Mapping[int, str]]
    call: Callable[[Tensors], Tensors]


class _ByPosition(torch.nn.Module):  # type: ignore[misc]  # no type information
    """The model as torch.onnx takes it: tensors in and out by position."""

    def __init__(self, model: torch.nn.Module, sample: Sample) -> None:
        super().__init__()
        self.model, self.sample = model, sample

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.sample.call(dict(zip(self.sample.inputs, tensors, strict=True))).values())


def export(folder: Path, file: Path) -> dict[str, str]:
    """Write the ONNX file of a folder, and its tokenizer.json where the folder has none; return task and architecture.

    Raises `ExportError`: the architecture is not known, or has inputs that are not.
    """
    model = _load(folder)
    architecture = type(model).__name__
    if model.config.is_encoder_decoder and hasattr(model, "get_encoder"):
        model = model.get_encoder()
    with torch.no_grad():
        sample = _sample(model, architecture, embeds=read_pooling(folder) is not None)
        outputs = sample.call(sample.inputs)
        names, tokens = list(outputs), sample.inputs.get("input_ids", torch.empty(0, 0)).shape[1]
        axes = dict(sample.axes)
        for name, tensor in outputs.items():
            axes[name] = {0: "batch"} | ({1: "sequence"} if tensor.ndim == 3 and tensor.shape[1] == tokens else {})
            if name.startswith(_PRESENT):
                axes[name] = {0: "batch", 2: "past_sequence + sequence"}
        torch.onnx.export(
            _ByPosition(model, sample).eval(), tuple(sample.inputs.values()), str(file),
            input_names=list(sample.inputs), output_names=names, dynamic_axes=axes, opset_version=_OPSET, dynamo=False,
        )  # fmt: skip
    if len(parts := list(file.parent.iterdir())) > 1:  # weights above 2 GiB, each in a file of its own
        loaded = onnx.load(file)
        for part in parts:
            part.unlink()
        onnx.save(loaded, file, save_as_external_data=True, location=f"{file.name}.data")
    if not (folder / TOKENIZER_FILE).is_file() and "input_ids" in sample.inputs:
        with contextlib.suppress(Exception):  # a model without a tokenizer is exported all the same
            transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer.save(str(file.parent / TOKENIZER_FILE))
    return {"task": sample.task, "architecture": architecture}


def _load(folder: Path) -> torch.nn.Module:
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError) as e:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        known = list(auto.MODEL_MAPPING_NAMES)
        raise ExportError(_unknown("model_type", str(named), known)) from e
    names = [] if read_pooling(folder) is not None else list(config.architectures or [])
    chosen = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if chosen is None:
        known = sorted(name for name in dir(transformers) if name.endswith(("Model", "LM", "Classification")))
        raise ExportError(_unknown("architecture", names[0], known))
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ExportError(f"{folder} has no weights; expected model.safetensors beside config.json")
    return chosen.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 5, 0.5)
    alike = f"; these are alike: {', '.join(near)}" if near else f"; some of them: {', '.join(known[:20])}"
    version = transformers.__version__
    return f"{what} {name} is none of the {len(known)} that transformers {version} knows{alike}"


def _sample(model: torch.nn.Module, architecture: str, *, embeds: bool) -> Sample:
    """Return a call of a model, by what its `forward` takes and what transformers lists it as."""
    config, names = model.config, inspect.signature(model.forward).parameters
    if "pixel_values" in names:
        return _of_images(model, "vision tower" if "input_ids" in names else "vision")
    if "input_ids" not in names:
        return _of_sound(model)
    inputs = {
        "input_ids": torch.randint(0, min(config.vocab_size, 100), (_BATCH, _TOKENS)),
        "attention_mask": torch.ones(_BATCH, _TOKENS, dtype=torch.int64),
        "token_type_ids": torch.zeros(_BATCH, _TOKENS, dtype=torch.int64),
    }
    if not getattr(config, "type_vocab_size", 0) > 1:
        del inputs["token_type_ids"]
    inputs = {name: tensor for name, tensor in inputs.items() if name in names}
    axes = {name: {0: "batch", 1: "sequence"} for name in inputs}
    plain = {"use_cache": False} if "use_cache" in names else {}
    if architecture in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and plain:
        step = _of_step(model, inputs)
        if step is not None:
            return step
    if embeds or architecture in auto.MODEL_MAPPING_NAMES.values():
        return Sample("embedding", inputs, axes, lambda given: _tensors(model(**given, **plain), "last_hidden_state"))
    return Sample(architecture, inputs, axes, lambda given: _tensors(model(**given, **plain)))


def _of_step(model: torch.nn.Module, inputs: Tensors) -> Sample | None:
    """Return the step of a decoder, caches in and out; None where it keeps no keys and values."""
    ids = inputs["input_ids"]
    past = model(input_ids=ids[:, :_PAST], past_key_values=transformers.DynamicCache(), use_cache=True).past_key_values
    pairs = _pairs(past)
    if not pairs or any(pair is None or pair.ndim != 4 for pair in pairs.values()):
        return None
    step = {"input_ids": ids[:, _PAST:], "attention_mask": inputs["attention_mask"]}
    axes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "past_sequence + sequence"}}
    if "position_ids" in inspect.signature(model.forward).parameters:
        step["position_ids"] = torch.arange(_PAST, _TOKENS).repeat(_BATCH, 1)
        axes["position_ids"] = axes["input_ids"]
    axes |= {f"past_key_values.{name}": {0: "batch", 2: "past_sequence"} for name in pairs}
    caches = {f"past_key_values.{name}": tensor for name, tensor in pairs.items()}

    def call(given: Tensors) -> Tensors:
        cache = transformers.DynamicCache()
        for layer in range(len(pairs) // 2):
            cache.update(*(given[f"past_key_values.{layer}.{part}"] for part in ("key", "value")), layer)
        others = {name: tensor for name, tensor in given.items() if name not in caches}
        result = model(**others, past_key_values=cache, use_cache=True)
        present = {f"{_PRESENT}{name}": tensor for name, tensor in _pairs(result.past_key_values).items()}
        return {"logits": result.logits, **present}

    return Sample("decoder with caches", {**step, **caches}, axes, call)


def _pairs(cache: transformers.DynamicCache) -> Tensors:
    layers = enumerate(cache.layers)
    return {
        f"{layer}.{part}": getattr(one, f"{part}s", None) for layer, one in layers for part in ("key", "value")
    }  # fmt: skip


def _of_images(model: torch.nn.Module, task: str) -> Sample:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    image = torch.rand(_BATCH, getattr(config, "num_channels", 3), height, width)
    run = model.get_image_features if task == "vision tower" else model
    return Sample(task, {"pixel_values": image}, {"pixel_values": {0: "batch"}}, lambda given: _tensors(run(**given)))


def _of_sound(model: torch.nn.Module) -> Sample:
    """Return a call of an encoder of speech: samples, or features of a fixed or free number of frames."""
    config, name = model.config, model.main_input_name
    bins, free = getattr(config, "num_mel_bins", None), {0: "batch"}
    if name == "input_values" and bins:
        sound = torch.rand(_BATCH, config.max_length, bins)
    elif name == "input_values":
        sound, free = torch.rand(_BATCH, _SAMPLES), {0: "batch", 1: "samples"}
    elif name == "input_features" and hasattr(config, "max_source_positions") and bins:
        sound = torch.rand(_BATCH, bins, 2 * config.max_source_positions)
    elif name == "input_features" and hasattr(config, "feature_projection_input_dim"):
        sound, free = torch.rand(_BATCH, 64, config.feature_projection_input_dim), {0: "batch", 1: "frames"}
    else:
        raise ExportError(f"{type(model).__name__} takes {name}; expected token ids, images or sound")
    return Sample("speech encoder", {name: sound}, {name: free}, lambda given: _tensors(model(**given)))


def _tensors(result: Any, *only: str) -> Tensors:
    """Return the tensors of an answer by name, all or some of them."""
    if isinstance(result, torch.Tensor):
        return {"output": result}
    found = {name: value for name, value in dict(result).items() if isinstance(value, torch.Tensor)}
    return {name: found[name] for name in only or found}


def main() -> None:
    """Export what the command line names; a failure is a line on stderr."""
    folder, file = map(Path, sys.argv[1:])
    logging.disable()
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            report = export(folder, file)
    except Exception as e:  # a model's code raises every kind of exception; each becomes a line
        if "--debug" in sys.argv:
            raise
        lines = str(e).strip().splitlines() or [""]
        sys.exit(f"{type(e).__name__}: {lines[0]}")
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
