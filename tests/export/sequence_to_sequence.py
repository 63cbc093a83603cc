"""Encoder-decoders: the encoder alone, the whole model over two sentences, and a decode step with its caches."""

from __future__ import annotations

import torch
import transformers as tf

from tests.export.recipes import (
    BATCH,
    HEADS,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    Axes,
    Families,
    Family,
    Tensors,
    text_inputs,
)

TARGET = 7
_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0}
_FEATURES, _FRAMES = 8, 64


def t5_encoder(hidden: int) -> torch.nn.Module:
    return tf.T5EncoderModel(_t5_config(hidden))


def t5(hidden: int) -> torch.nn.Module:
    return tf.T5ForConditionalGeneration(_t5_config(hidden))


def bart(hidden: int) -> torch.nn.Module:
    return tf.BartForConditionalGeneration(tf.BartConfig(**_both_sides(hidden), max_position_embeddings=64))


def marian(hidden: int) -> torch.nn.Module:
    return tf.MarianMTModel(
        tf.MarianConfig(**_both_sides(hidden) | {"pad_token_id": VOCABULARY - 1}, max_position_embeddings=64)
    )


def whisper(hidden: int) -> torch.nn.Module:
    return tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(
            **_both_sides(hidden), num_mel_bins=_FEATURES, max_source_positions=_FRAMES // 2, max_target_positions=32
        )
    )


def whisper_encoder(hidden: int) -> torch.nn.Module:
    return whisper(hidden).model.encoder


def _t5_config(hidden: int) -> tf.T5Config:
    return tf.T5Config(
        vocab_size=VOCABULARY, d_model=hidden, d_kv=hidden // HEADS, d_ff=4 * hidden, num_layers=LAYERS,
        num_heads=HEADS, decoder_start_token_id=0,
    )  # fmt: skip


def _both_sides(hidden: int) -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": hidden,
        **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * hidden for side in ("encoder", "decoder")},
        **_TOKENS,
    }


def two_sentences(model: torch.nn.Module) -> Tensors:
    """Return a padded source sentence, and the beginning of a translation."""
    return {**text_inputs(model), "decoder_input_ids": torch.randint(2, VOCABULARY - 1, (BATCH, TARGET))}


def two_sentences_axes(inputs: Tensors) -> Axes:
    return {name: {0: "batch", 1: "target" if name == "decoder_input_ids" else "sequence"} for name in inputs}


def features(model: torch.nn.Module) -> Tensors:
    del model
    return {"input_features": torch.randn(BATCH, _FEATURES, _FRAMES)}


def features_and_sentence(model: torch.nn.Module) -> Tensors:
    """Return sound, and the beginning of a transcript with its mask."""
    return {
        **features(model),
        "decoder_input_ids": torch.randint(2, VOCABULARY, (BATCH, TARGET)),
        "decoder_attention_mask": torch.ones(BATCH, TARGET, dtype=torch.int64),
    }


def features_axes(inputs: Tensors) -> Axes:
    return {name: {0: "batch"} | ({1: "target"} if name.startswith("decoder") else {}) for name in inputs}


def logits(model: torch.nn.Module, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    return (model(**inputs, use_cache=False).logits,)


def translation_step_inputs(model: torch.nn.Module) -> Tensors:
    """Return one new token, the encoder's answer, and the caches of both attentions of every layer of the decoder."""
    config = model.config
    size = config.hidden_size // HEADS
    caches = {
        f"past_key_values.{layer}.{side}.{part}": torch.randn(BATCH, HEADS, length, size)
        for layer in range(LAYERS)
        for side, length in (("decoder", TARGET), ("encoder", SEQUENCE))
        for part in ("key", "value")
    }
    mask = text_inputs(model)["attention_mask"]
    return {"decoder_input_ids": torch.randint(2, VOCABULARY, (BATCH, 1)), "encoder_attention_mask": mask, **caches}


def translation_step_axes(inputs: Tensors) -> Axes:
    axes: Axes = {}
    for name in inputs:
        if name == "encoder_attention_mask":
            axes[name] = {0: "batch", 1: "sequence"}
        elif ".decoder." in name:
            axes[name] = {0: "batch", 2: "past_sequence"}
        elif ".encoder." in name:
            axes[name] = {0: "batch", 2: "sequence"}
        else:
            axes[name] = {0: "batch"}
    return axes


def translation_step(model: torch.nn.Module, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Return logits and the decoder's grown caches; those of the encoder's answer do not change."""
    own, cross = tf.DynamicCache(), tf.DynamicCache()
    for layer in range(LAYERS):
        for cache, side in ((own, "decoder"), (cross, "encoder")):
            cache.update(*(inputs[f"past_key_values.{layer}.{side}.{part}"] for part in ("key", "value")), layer)
    caches = tf.EncoderDecoderCache(own, cross)
    # The decoder reads no values of the encoder's answer when the caches hold its keys, only its length.
    keys = inputs["past_key_values.0.encoder.key"]
    answer = keys.transpose(1, 2).reshape(keys.shape[0], keys.shape[2], -1)
    result = model(
        encoder_outputs=(answer,), attention_mask=inputs["encoder_attention_mask"],
        decoder_input_ids=inputs["decoder_input_ids"], past_key_values=caches, use_cache=True,
    )  # fmt: skip
    grown = result.past_key_values.self_attention_cache.layers
    return (result.logits, *(tensor for layer in grown for tensor in (layer.keys, layer.values)))


_STEP_OUTPUTS = (
    "logits",
    *(f"present.{layer}.decoder.{part}" for layer in range(LAYERS) for part in ("key", "value")),
)

SEQUENCE_TO_SEQUENCE: Families = {
    "t5-encoder": Family(t5_encoder, text_inputs),
    "t5": Family(t5, two_sentences, ("logits",), logits, two_sentences_axes),
    "bart": Family(bart, two_sentences, ("logits",), logits, two_sentences_axes),
    "marian": Family(marian, two_sentences, ("logits",), logits, two_sentences_axes),
    "whisper-encoder": Family(whisper_encoder, features, axes=features_axes),
    "whisper": Family(whisper, features_and_sentence, ("logits",), logits, features_axes),
    "t5-decode": Family(t5, translation_step_inputs, _STEP_OUTPUTS, translation_step, translation_step_axes),
    "bart-decode": Family(bart, translation_step_inputs, _STEP_OUTPUTS, translation_step, translation_step_axes),
}
