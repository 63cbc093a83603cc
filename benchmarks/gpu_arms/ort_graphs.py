"""ONNX Runtime's fused form of a case: its contrib operators over the zoo's own weights, written out directly.

    BERT   EmbedLayerNormalization, then a layer: Attention (packed QKV), MatMul, SkipLayerNormalization, MatMul,
           BiasGelu, MatMul, SkipLayerNormalization; pooler
    GPT-2  embeddings, then a layer: Attention (unidirectional), MatMul, SkipLayerNormalization (which also gives the
           sum), MatMul, FastGelu, MatMul; output head
    ViT    patches, then a layer as GPT-2's with BiasGelu; classifier

It is the strongest form that ONNX Runtime has of these graphs; its own optimiser writes the same operators where it
recognises them. Llama has no such form here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.gpu_arms.cases import Case, Family
from relaxtune.models.zoo.bert import BertConfig
from relaxtune.models.zoo.gpt2 import Gpt2Config
from relaxtune.models.zoo.vit import VitConfig

_CONTRIB = "com.microsoft"
_OPSET = 18
_IR_VERSION = 8


class NoFusedGraphError(Exception):
    """A case has no fused ONNX Runtime graph here."""


class _Graph:
    """Collects nodes and weights; real values are in one dtype."""

    def __init__(self, weights: Mapping[str, np.ndarray], dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.element_type = helper.np_dtype_to_tensor_dtype(self.dtype)
        self.weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}

    def weight(self, *names: str) -> str:
        """Return an initializer of one weight, or of several side by side along the last axis."""
        joined = np.concatenate([self.weights[name] for name in names], axis=-1) if len(names) > 1 else None
        return self.constant(names[0], self.weights[names[0]] if joined is None else joined)

    def constant(self, name: str, value: np.ndarray) -> str:
        """Return an initializer, floats in the graph's dtype."""
        array = value.astype(self.dtype) if value.dtype.kind == "f" else value
        self._initializers.setdefault(name, numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def op(self, op_type: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: object) -> list[str]:
        """Add a node and return its outputs."""
        base = f"{op_type}_{len(self._nodes)}"
        produced = [f"{base}_{index}" for index in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), produced, base, domain=domain, **attributes))
        return produced

    def fused(self, op_type: str, *inputs: str, **attributes: object) -> str:
        """Add a contrib node and return its first output."""
        return self.op(op_type, *inputs, domain=_CONTRIB, **attributes)[0]

    def skip_norm(self, x: str, skip: str, norm: str, bias: str, epsilon: float) -> tuple[str, str]:
        """Return LayerNorm(x + bias + skip), and that sum."""
        inputs = (x, skip, self.weight(f"{norm}.weight"), self.weight(f"{norm}.bias"), self.weight(bias))
        self._nodes.append(
            helper.make_node(
                "SkipLayerNormalization",
                list(inputs),
                [f"{norm}.out", "", "", f"{norm}.sum"],
                norm,
                domain=_CONTRIB,
                epsilon=epsilon,
            )
        )
        return f"{norm}.out", f"{norm}.sum"

    def model(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
        """Return the serialised model; `outputs` gives each output's value and shape."""
        declared = []
        for name, (value, shape) in outputs.items():
            self._nodes.append(helper.make_node("Identity", [value], [name]))
            declared.append(helper.make_tensor_value_info(name, self.element_type, list(shape)))
        graph = helper.make_graph(self._nodes, "fused", list(inputs), declared, list(self._initializers.values()))
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString())


def fused_graph(case: Case, weights: Mapping[str, np.ndarray], *, dtype: str, masked: bool) -> bytes:
    """Return the serialised fused graph of a case.

    Parameters
    ----------
    case : Case
        Its inputs keep their names; token ids and masks are int32, which the contrib operators take.
    weights : mapping of str to array
        The zoo's weights by name.
    dtype : str
        "float16", or "float32" for the CPU.
    masked : bool
        Whether the padding mask is honoured; without it all tokens are taken as real.

    Raises
    ------
    NoFusedGraphError
        Llama.
    """
    graph = _Graph(weights, dtype)
    if case.family is Family.BERT:
        return _bert(graph, case, masked)
    if case.family is Family.GPT2:
        return _gpt2(graph, case, masked)
    if case.family is Family.VIT:
        return _vit(graph, case)
    raise NoFusedGraphError(f"no fused ONNX Runtime graph is written for {case.family.value}")


def _bert(g: _Graph, case: Case, masked: bool) -> bytes:
    config = case.preset.config
    assert isinstance(config, BertConfig)
    embedded = g.op(
        "EmbedLayerNormalization",
        "input_ids",
        "token_type_ids",
        *(g.weight(f"embeddings.{which}_embeddings.weight") for which in ("word", "position", "token_type")),
        g.weight("embeddings.LayerNorm.weight"),
        g.weight("embeddings.LayerNorm.bias"),
        *(["attention_mask"] if masked else []),
        domain=_CONTRIB,
        outputs=2,
        epsilon=config.epsilon,
    )
    hidden, lengths = embedded[0], embedded[1]
    for index in range(config.layers):
        name = f"encoder.layer.{index}"
        parts = [f"{name}.attention.{which}" for which in ("query", "key", "value")]
        attended = _attention(g, hidden, parts, config.heads, lengths if masked else None)
        mixed = g.op("MatMul", attended, g.weight(f"{name}.attention.output.dense.weight"))[0]
        norm = f"{name}.attention.output.LayerNorm"
        hidden, _ = g.skip_norm(mixed, hidden, norm, f"{name}.attention.output.dense.bias", config.epsilon)
        wide = g.op("MatMul", hidden, g.weight(f"{name}.intermediate.dense.weight"))[0]
        wide = g.fused("BiasGelu", wide, g.weight(f"{name}.intermediate.dense.bias"))
        narrow = g.op("MatMul", wide, g.weight(f"{name}.output.dense.weight"))[0]
        hidden, _ = g.skip_norm(narrow, hidden, f"{name}.output.LayerNorm", f"{name}.output.dense.bias", config.epsilon)
    first = g.op("Gather", hidden, g.constant("first", np.asarray(0, np.int64)), axis=1)[0]
    pooled = g.op("Gemm", first, g.weight("pooler.dense.weight"), g.weight("pooler.dense.bias"))[0]
    pooled = g.op("Tanh", pooled)[0]
    shape = (*case.shapes["input_ids"], config.hidden)
    names = ("input_ids", "token_type_ids", *(("attention_mask",) if masked else ()))
    outputs = {"last_hidden_state": (hidden, shape), "pooler_output": (pooled, (shape[0], shape[2]))}
    return g.model(_integers(case, names), outputs)


def _gpt2(g: _Graph, case: Case, masked: bool) -> bytes:
    config = case.preset.config
    assert isinstance(config, Gpt2Config)
    batch, length = case.shapes["input_ids"]
    table = g.weight("transformer.wte.weight")
    words = g.op("Gather", table, "input_ids")[0]
    places = g.weights["transformer.wpe.weight"][None, :length]
    total = g.op("Add", words, g.constant("places", places))[0]
    names = [f"transformer.h.{index}" for index in range(config.layers)]
    normed = g.op("LayerNormalization", total, *_gain_and_bias(g, f"{names[0]}.ln_1"), axis=-1, epsilon=config.epsilon)[
        0
    ]
    for index, name in enumerate(names):
        attended = _attention(
            g, normed, [f"{name}.attn.c_attn"], config.heads, "attention_mask" if masked else None, unidirectional=1
        )
        mixed = g.op("MatMul", attended, g.weight(f"{name}.attn.c_proj.weight"))[0]
        normed, total = g.skip_norm(mixed, total, f"{name}.ln_2", f"{name}.attn.c_proj.bias", config.epsilon)
        wide = g.op("MatMul", normed, g.weight(f"{name}.mlp.c_fc.weight"))[0]
        wide = g.fused("FastGelu", wide, g.weight(f"{name}.mlp.c_fc.bias"))
        narrow = g.op("MatMul", wide, g.weight(f"{name}.mlp.c_proj.weight"))[0]
        following = f"{names[index + 1]}.ln_1" if index + 1 < len(names) else "transformer.ln_f"
        normed, total = g.skip_norm(narrow, total, following, f"{name}.mlp.c_proj.bias", config.epsilon)
    logits = g.fused("FusedMatMul", normed, table, transB=1)
    inputs = ("input_ids", *(("attention_mask",) if masked else ()))
    return g.model(_integers(case, inputs), {"logits": (logits, (batch, length, config.vocab))})


def _vit(g: _Graph, case: Case) -> bytes:
    config = case.preset.config
    assert isinstance(config, VitConfig)
    shape = case.shapes["pixel_values"]
    patches = "embeddings.patch_embeddings.projection"
    grid = g.op(
        "Conv",
        "pixel_values",
        g.weight(f"{patches}.weight"),
        g.weight(f"{patches}.bias"),
        kernel_shape=[config.patch] * 2,
        strides=[config.patch] * 2,
    )[0]
    flat = g.constant("flat", np.asarray([shape[0], config.hidden, config.tokens - 1], np.int64))
    tokens = g.op("Transpose", g.op("Reshape", grid, flat)[0], perm=[0, 2, 1])[0]
    token = np.broadcast_to(g.weights["embeddings.cls_token"], (shape[0], 1, config.hidden))
    placed = g.op("Concat", g.constant("token", token), tokens, axis=1)[0]
    total = g.op("Add", placed, g.weight("embeddings.position_embeddings"))[0]
    names = [f"encoder.layer.{index}" for index in range(config.layers)]
    normed = g.op(
        "LayerNormalization", total, *_gain_and_bias(g, f"{names[0]}.layernorm_before"), axis=-1, epsilon=config.epsilon
    )[0]
    for index, name in enumerate(names):
        parts = [f"{name}.attention.{which}" for which in ("query", "key", "value")]
        attended = _attention(g, normed, parts, config.heads, None)
        mixed = g.op("MatMul", attended, g.weight(f"{name}.attention.output.dense.weight"))[0]
        bias = f"{name}.attention.output.dense.bias"
        normed, total = g.skip_norm(mixed, total, f"{name}.layernorm_after", bias, config.epsilon)
        wide = g.op("MatMul", normed, g.weight(f"{name}.intermediate.dense.weight"))[0]
        wide = g.fused("BiasGelu", wide, g.weight(f"{name}.intermediate.dense.bias"))
        narrow = g.op("MatMul", wide, g.weight(f"{name}.output.dense.weight"))[0]
        following = f"{names[index + 1]}.layernorm_before" if index + 1 < len(names) else "layernorm"
        normed, total = g.skip_norm(narrow, total, following, f"{name}.output.dense.bias", config.epsilon)
    first = g.op("Gather", normed, g.constant("first", np.asarray(0, np.int64)), axis=1)[0]
    logits = g.op("Gemm", first, g.weight("classifier.weight"), g.weight("classifier.bias"))[0]
    pixels = helper.make_tensor_value_info("pixel_values", g.element_type, list(shape))
    outputs = {
        "logits": (logits, (shape[0], config.classes)),
        "last_hidden_state": (normed, (shape[0], config.tokens, config.hidden)),
    }
    return g.model([pixels], outputs)


def _attention(g: _Graph, x: str, parts: Sequence[str], heads: int, mask: str | None, unidirectional: int = 0) -> str:
    weight, bias = (g.weight(*(f"{part}.{which}" for part in parts)) for which in ("weight", "bias"))
    masks = [mask] if mask is not None else []
    return g.fused("Attention", x, weight, bias, *masks, num_heads=heads, unidirectional=unidirectional)


def _gain_and_bias(g: _Graph, norm: str) -> tuple[str, str]:
    return g.weight(f"{norm}.weight"), g.weight(f"{norm}.bias")


def _integers(case: Case, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, TensorProto.INT32, list(case.shapes[name])) for name in names]
