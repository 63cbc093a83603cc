"""Every architecture of transformers that has no recipe of its own: its own configuration, with small numbers.

What a configuration calls its sizes is known by name; lists of layers and what a configuration derives from sizes are
left to it. A model that does not answer on inputs of these sizes is no family: `python -m tests.export.any_family`
lists which and why.
"""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Mapping

import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
    MODEL_MAPPING_NAMES,
)

from tests.export.recipes import BATCH, HEADS, LAYERS, SEQUENCE, VOCABULARY, Families, Family, Tensors

# Grouped heads, and positions for a sentence with an offset as RoBERTa's.
_POSITIONS, _IMAGE, _PATCH, _SAMPLES, _FRAMES, _MELS = 80, 32, 8, 1600, 64, 16
_BY_NAME = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_decoder_layers", "encoder_layers", "decoder_layers", "depth", "n_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), HEADS // 2),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "n_ctx"), _POSITIONS),
    **dict.fromkeys(("max_target_positions", "max_seq_len", "max_length", "max_sequence_length"), _POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    **dict.fromkeys(("num_mel_bins", "feature_size", "num_mel_channels"), _MELS),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("sep_token_id", "cls_token_id", "unk_token_id", "mask_token_id"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **{"image_size": _IMAGE, "patch_size": _PATCH, "qk_rope_head_dim": 8, "n_shared_experts": 1, "type_vocab_size": 2},
    **{"max_source_positions": _FRAMES // 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}  # fmt: skip
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "projection_dim", "emb_dim")
_HIDDEN += ("embedding_size", "hidden_dim", "model_dim", "width", "rnn_hidden_size", "decoder_hidden_size")
_WIDE = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dim_feedforward", "n_inner")
_WIDE += ("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "d_inner")
# A head's width is kept the hidden size's share, also where the configuration says one of its own.
_HEAD = ("head_dim", "d_kv", "kv_channels", "attention_head_size", "d_head")

# Where sizes depend on each other, or a default is none.
_OWN: dict[str, dict[str, object]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_key_value_heads": HEADS, "head_dim": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": HEADS, "head_dim": 8},
    "nemotron": {"head_dim": 16, "num_key_value_heads": HEADS // 2},
    "ministral": {"head_dim": 16},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 2, "pad_token_id": 1},
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "lilt": {"hidden_size": 96},
}

# What people use, first; the rest by name.
FIRST = [
    "xlm-roberta", "deberta", "camembert", "mt5", "pegasus", "mbart", "m2m_100", "blenderbot", "led", "longt5",
    "umt5", "switch_transformers", "gpt_neo", "gptj", "gpt_bigcode", "codegen", "qwen3_moe", "olmo", "olmo2",
    "olmo3", "olmoe", "gemma3_text", "falcon", "mpt", "deepseek_v2", "deepseek_v3", "gpt_oss", "granite",
    "granitemoe", "starcoder2", "stablelm", "cohere", "cohere2", "glm", "glm4", "helium", "smollm3", "ministral",
    "exaone4", "nemotron", "persimmon", "biogpt", "xglm", "phimoe", "jetmoe", "mamba", "mamba2", "deit", "beit",
    "swinv2", "dinov2_with_registers", "dinov3_vit", "vit_mae", "vit_msn", "pvt_v2", "cvt", "levit", "mobilevit",
    "poolformer", "convnext", "convnextv2", "resnet", "hiera", "focalnet", "ijepa", "data2vec-vision", "siglip",
    "siglip2", "align", "blip", "wav2vec2", "wav2vec2-bert", "hubert", "wavlm", "sew", "unispeech",
    "data2vec-audio", "audio-spectrogram-transformer", "yolos", "detr", "layoutlm", "lilt", "rembert",
    "squeezebert", "mobilebert", "megatron-bert", "roformer", "ernie", "esm", "nomic_bert", "eurobert", "fnet",
    "funnel", "convbert", "canine", "xlm", "flaubert", "ibert", "data2vec-text", "roberta-prelayernorm", "xmod",
    "splinter", "nystromformer", "yoso", "mra",
]  # fmt: skip


def _small(config: tf.PreTrainedConfig, hidden: int) -> dict[str, object]:
    """Return the arguments that make a configuration small."""
    small: dict[str, object] = {}
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if isinstance(part, tf.PreTrainedConfig):
            small[name] = {"model_type": part.model_type, **_small(part, hidden)}
        elif isinstance(value, bool) or not isinstance(value, (int, type(None), tuple, list)):
            continue
        elif name in _BY_NAME and (isinstance(value, int) or name.endswith("token_id")):
            small[name] = _BY_NAME[name]
        elif name == "image_size" and value:
            small[name] = [_IMAGE, _IMAGE]
        elif name in _HIDDEN and isinstance(value, int):
            small[name] = hidden
        elif name in _WIDE and isinstance(value, int):
            small[name] = 2 * hidden
        elif name in _HEAD and isinstance(value, int):
            small[name] = hidden // HEADS
    return small | _OWN.get(config.model_type, {})


def _config(kind: str, hidden: int) -> tf.PreTrainedConfig:
    of_kind = CONFIG_MAPPING[kind]
    return of_kind(**_small(of_kind(), hidden))


def build(kind: str, hidden: int) -> torch.nn.Module:
    """Return a small model of an architecture: with a head of tokens where it writes text, else bare."""
    config = _config(kind, hidden)
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    bidirectional = {"bert", "roberta", "electra"} & set(kind.replace("-", "_").split("_"))
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if causal and not bidirectional else MODEL_MAPPING
    chosen = mapping[type(config)]
    return (chosen[0] if isinstance(chosen, tuple) else chosen)(config)


def _inputs(model: torch.nn.Module) -> Tensors:
    """Return the inputs that a model's `forward` names: tokens, an image, sound or its features."""
    names = inspect.signature(model.forward).parameters
    config = model.config
    inputs: Tensors = {}
    if "input_ids" in names:
        inputs["input_ids"] = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE))
        if "attention_mask" in names:
            inputs["attention_mask"] = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
            inputs["attention_mask"][:, -3:] = 0
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        inputs["pixel_values"] = torch.randn(BATCH, getattr(vision, "num_channels", 3), *_image(vision))
    if "input_values" in names and not inputs:
        long = getattr(config, "max_length", None)
        spectrogram = kinds_of_sound(model) == "spectrogram"
        inputs["input_values"] = torch.randn(BATCH, long, _MELS) if spectrogram else torch.randn(BATCH, _SAMPLES)
    if "input_features" in names and not inputs:
        wide = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", _MELS)
        whisper = hasattr(config, "max_source_positions") and config.model_type == "whisper"
        inputs["input_features"] = torch.randn(BATCH, wide, _FRAMES) if whisper else torch.randn(BATCH, _FRAMES, wide)
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = torch.randint(2, VOCABULARY, (BATCH, 7))
    return inputs


def kinds_of_sound(model: torch.nn.Module) -> str:
    """Return whether a model hears samples or a spectrogram."""
    return "spectrogram" if hasattr(model.config, "max_length") and hasattr(model.config, "num_mel_bins") else "samples"


def _image(config: tf.PreTrainedConfig) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or _IMAGE
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _call(model: torch.nn.Module, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    caches = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return (first_tensor(model(**inputs, **caches)),)


def first_tensor(answer: object) -> torch.Tensor:
    """Return the first floating-point tensor of an answer."""
    for value in answer.values() if isinstance(answer, Mapping) else answer:  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim:
            return value
    raise ValueError("the model answers with no tensor")


def _axes(inputs: Tensors) -> dict[str, dict[int, str]]:
    own = {"input_ids": "sequence", "attention_mask": "sequence", "decoder_input_ids": "target"}
    return {name: {0: "batch"} | ({1: own[name]} if name in own else {}) for name in inputs}


def family(kind: str) -> Family:
    """Return the family of an architecture."""
    return Family(lambda hidden: build(kind, hidden), _inputs, ("output",), _call, _axes)


def _kinds() -> list[str]:
    models = {**MODEL_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    kinds = [kind for kind in CONFIG_MAPPING_NAMES if kind in models]
    return [*(kind for kind in FIRST if kind in kinds), *sorted(set(kinds) - set(FIRST))]


ANY: Families = {kind: family(kind) for kind in _kinds()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=list(ANY), default=list(ANY))
    warnings.simplefilter("ignore")
    good = 0
    for kind in (kinds := parser.parse_args().family):
        torch.manual_seed(0)
        try:
            model = ANY[kind].build(64).eval()
            with torch.no_grad():
                (answer,) = ANY[kind].answer(model, ANY[kind].inputs(model))
        except Exception as e:  # a model's code raises every kind of exception; each is a line
            print(f"{kind}: {type(e).__name__}: {str(e).strip().splitlines()[0][:150] if str(e).strip() else ''}")
            continue
        good += 1
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{kind}: {tuple(answer.shape)}, {size} weights")
    print(f"{good} of {len(kinds)} architectures answer")


if __name__ == "__main__":
    main()
