"""Decoders of text: over a sentence, and with caches of keys and values as outputs (prefill) or both ways (decode)."""

from __future__ import annotations

import torch
import transformers as tf

from tests.export.recipes import HEADS, LAYERS, VOCABULARY, Families, decode_step, decoder, prefill

_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(hidden: int) -> torch.nn.Module:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCABULARY, n_embd=hidden, n_layer=LAYERS, n_head=HEADS, n_positions=64, **_TOKENS)
    )


def gpt_neox(hidden: int) -> torch.nn.Module:
    """Half of each head rotated, attention and feed-forward side by side."""
    return tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(**_common(hidden, 4), rope_parameters={**_ROPE, "partial_rotary_factor": 0.5})
    )


def opt(hidden: int) -> torch.nn.Module:
    # Eager attention: in a decode step with a symbolic cache torch.export refuses how OPT asks for a causal mask.
    return tf.OPTForCausalLM(
        tf.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            ffn_dim=4 * hidden, max_position_embeddings=64, word_embed_proj_dim=hidden,
            attn_implementation="eager", **_TOKENS | {"pad_token_id": 1},
        )
    )  # fmt: skip


def bloom(hidden: int) -> torch.nn.Module:
    """ALiBi: a slope of each head times the distance, in place of positions."""
    return tf.BloomForCausalLM(
        tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=hidden, n_layer=LAYERS, n_head=HEADS, **_TOKENS)
    )


def llama(hidden: int) -> torch.nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_grouped(hidden)))


def mistral(hidden: int) -> torch.nn.Module:
    """A sliding window shorter than the sentence."""
    return tf.MistralForCausalLM(tf.MistralConfig(**_grouped(hidden), sliding_window=8))


def qwen2(hidden: int) -> torch.nn.Module:
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**_grouped(hidden)))


def qwen3(hidden: int) -> torch.nn.Module:
    """Norms of queries and keys, and a head size that is not hidden / heads."""
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**_grouped(hidden), head_dim=hidden // 2))


def phi(hidden: int) -> torch.nn.Module:
    return tf.PhiForCausalLM(tf.PhiConfig(**_grouped(hidden), rope_parameters={**_ROPE, "partial_rotary_factor": 0.5}))


def phi3(hidden: int) -> torch.nn.Module:
    """Combined projections of queries, keys and values, and of gate and value."""
    return tf.Phi3ForCausalLM(tf.Phi3Config(**_grouped(hidden)))


def gemma(hidden: int) -> torch.nn.Module:
    return tf.GemmaForCausalLM(tf.GemmaConfig(**_grouped(hidden), head_dim=hidden // 2))


def gemma2(hidden: int) -> torch.nn.Module:
    """Capped scores and logits, norms on both sides, a window in every other layer."""
    return tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **_grouped(hidden), head_dim=hidden // 2, sliding_window=8, attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0, query_pre_attn_scalar=hidden // 2,
        )
    )  # fmt: skip


def gemma3(hidden: int) -> torch.nn.Module:
    """Norms of queries and keys, a window with a rotary base of its own in every other layer."""
    config = tf.Gemma3TextConfig(
        **_grouped(hidden), head_dim=hidden // 2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=hidden // 2,
    )  # fmt: skip
    return tf.Gemma3ForCausalLM(config)


def mixtral(hidden: int) -> torch.nn.Module:
    return tf.MixtralForCausalLM(tf.MixtralConfig(**_grouped(hidden), num_local_experts=4, num_experts_per_tok=2))


def qwen2_moe(hidden: int) -> torch.nn.Module:
    """Experts and one that every token passes."""
    config = tf.Qwen2MoeConfig(
        **_grouped(hidden), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
    )  # fmt: skip
    return tf.Qwen2MoeForCausalLM(config)


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _common(hidden: int, widening: int) -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": widening * hidden,
        "max_position_embeddings": 64,
        **_TOKENS,
    }


def _grouped(hidden: int) -> dict[str, int]:
    return {**_common(hidden, 2), "num_key_value_heads": HEADS // 2}


_BUILDERS = {
    "gpt2": gpt2,
    "gpt-neox": gpt_neox,
    "opt": opt,
    "bloom": bloom,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi": phi,
    "phi3": phi3,
    "gemma": gemma,
    "gemma2": gemma2,
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
}

DECODERS: Families = {
    **{name: decoder(build) for name, build in _BUILDERS.items()},
    **{f"{name}-prefill": prefill(_BUILDERS[name]) for name in ("gpt2", "llama")},
    **{
        f"{name}-decode": decode_step(_BUILDERS[name])
        for name in ("gpt2", "gpt-neox", "opt", "bloom", "llama", "mistral", "qwen3", "gemma2")
    },
}
# Decode steps whose tokens are compared, and that are in no matrix of exports.
GENERATING: Families = {
    f"{name}-decode": decode_step(build) for name, build in (("phi3", phi3), ("gemma3", gemma3), ("mixtral", mixtral))
}
