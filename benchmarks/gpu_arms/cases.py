"""The cases of the GPU table: a zoo model in float16 at one batch and sequence, its weights and its inputs.

Every arm takes the weights and inputs from here, so that all of them compute the same function of the same numbers.
The timed inputs have no padding; in a decode step the cache is full but for its last place, which the step fills.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import onnx

from relaxtune.models.dims import evaluate_dim
from relaxtune.models.inference import check_and_infer
from relaxtune.models.loading import make_model
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.models.spec import numpy_dtype
from relaxtune.models.zoo import Precision, Preset, get_preset
from relaxtune.models.zoo.bert import BertConfig
from relaxtune.models.zoo.gpt2 import Gpt2Config
from relaxtune.models.zoo.llama import LlamaConfig
from relaxtune.models.zoo.vit import VitConfig

WEIGHTS_SEED = 0
INPUTS_SEED = 0
_CACHE_SCALE = 0.5


class Family(StrEnum):
    """Which plain torch module and which fused ONNX graph computes a case."""

    BERT = "bert"
    GPT2 = "gpt2"
    LLAMA = "llama"
    LLAMA_DECODE = "llama-decode"
    VIT = "vit"


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes
    ----------
    model
        Name of the zoo's preset.
    batch
        Rows of the batch.
    length
        Tokens of a row, or of the cache after a decode step; None for images.
    """

    model: str
    batch: int
    length: int | None = None

    @property
    def name(self) -> str:
        """What the case is called on the command line, in results and as an artifact's directory."""
        size = f"{self.preset.config.image}" if isinstance(self.preset.config, VitConfig) else f"{self.length}"
        return f"{self.model}-{self.batch}x{size}"

    @property
    def source(self) -> str:
        """What to give `relaxtune tune` as MODEL: the zoo's graph built in float16."""
        return f"{self.model}:fp16"

    @property
    def preset(self) -> Preset:
        """The zoo's preset."""
        return get_preset(self.model)

    @property
    def family(self) -> Family:
        """The architecture.

        Raises
        ------
        ValueError
            The benchmark has no peers for this preset.
        """
        config = self.preset.config
        if isinstance(config, LlamaConfig):
            return Family.LLAMA_DECODE if self._is_decode else Family.LLAMA
        families = {BertConfig: Family.BERT, Gpt2Config: Family.GPT2, VitConfig: Family.VIT}
        family = families.get(type(config))
        if family is None or self._is_decode:
            raise ValueError(f"the GPU benchmark has no peers for zoo model {self.model!r}; see benchmarks/gpu_arms")
        return family

    @property
    def dims(self) -> dict[str, int]:
        """A number for every free axis of the preset."""
        if self.length is None:
            return {"batch": self.batch}
        if self._is_decode:
            return {"batch": self.batch, "past_sequence": self.length - 1}
        return {"batch": self.batch, "sequence": self.length}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every input."""
        return {spec.name: tuple(_size(axis, self.dims) for axis in spec.shape) for spec in self.preset.inputs}

    @property
    def _is_decode(self) -> bool:
        return "-decode" in self.model

    def with_layers(self, layers: int) -> Case:
        """Return the case of the same model with so many layers."""
        return replace(self, model=f"{re.sub(r'-[0-9]+-layers$', '', self.model)}-{layers}-layers")

    def proto(self, precision: Precision = Precision.FP16) -> onnx.ModelProto:
        """Return the graph with its weights, as the zoo builds it."""
        return self.preset.build(self.source, dict(self.dims), precision, WEIGHTS_SEED)

    def inputs(self, seed: int = INPUTS_SEED, real: str = "float16") -> dict[str, np.ndarray]:
        """Return one array for each input: random tokens, pixels and caches, masks of ones, positions in order."""
        rng = np.random.default_rng(seed)
        return {
            spec.name: self._draw(spec.name, real if "float" in spec.dtype else spec.dtype, rng)
            for spec in self.preset.inputs
        }

    def _draw(self, name: str, dtype: str, rng: np.random.Generator) -> np.ndarray:
        shape, config = self.shapes[name], self.preset.config
        values: np.ndarray
        if name == "attention_mask":
            values = np.ones(shape)
        elif name == "position_ids":
            values = np.full(shape, self.dims["past_sequence"])
        elif name == "token_type_ids":
            values = rng.integers(0, 2, shape)
        elif name == "input_ids":
            assert not isinstance(config, VitConfig)
            values = rng.integers(0, config.vocab, shape)
        else:
            scale = _CACHE_SCALE if name.startswith("past") else 1.0
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return values.astype(numpy_dtype(dtype))


CASES: tuple[Case, ...] = (
    Case("bert-base", 1, 128),
    Case("bert-base", 8, 128),
    Case("bert-base", 32, 128),
    Case("bert-base", 1, 512),
    Case("bert-base", 8, 512),
    Case("gpt2-small", 1, 128),
    Case("gpt2-small", 8, 512),
    Case("llama-1b", 1, 128),
    Case("llama-1b", 1, 2048),
    Case("llama-1b-decode", 1, 1024),
    Case("llama-1b-decode", 16, 1024),
    Case("vit-base", 8),
)


def weights_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return every weight of a case's graph by its name."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def checked_model(case: Case, proto: onnx.ModelProto) -> OnnxModel:
    """Return a case's graph, checked and with its signature."""
    check_and_infer(proto)
    return make_model(case.source, proto, path=None, data_dir=None, seed=WEIGHTS_SEED)


def find_cases(names: str | None, cases: tuple[Case, ...] = CASES) -> tuple[Case, ...]:
    """Return the cases of a comma-separated list, in the table's order; all of them for None.

    A name is a case's own or a model's, which stands for all cases of that model.

    Raises
    ------
    ValueError
        A name is neither.
    """
    if names is None:
        return cases
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    unknown = wanted - {case.name for case in cases} - {case.model for case in cases}
    if unknown:
        known = ", ".join(case.name for case in cases)
        raise ValueError(f"no case is called {', '.join(sorted(unknown))}; expected a model or one of {known}")
    return tuple(case for case in cases if case.name in wanted or case.model in wanted)


def _size(axis: int | str, dims: dict[str, int]) -> int:
    value = evaluate_dim(axis, dims)
    assert isinstance(value, int), axis
    return value
