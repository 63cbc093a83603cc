"""Vision transformers and dual encoders; their images have one size, so only the batch can be symbolic."""

from __future__ import annotations

import torch
import transformers as tf
from transformers.models.detr.modeling_detr import DetrEncoder

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
    batch_axes,
    text_inputs,
)

IMAGE, PATCH = 32, 8


def vit(hidden: int) -> torch.nn.Module:
    return tf.ViTModel(tf.ViTConfig(**_common(hidden)))


def swin(hidden: int) -> torch.nn.Module:
    """Two stages of shifted windows."""
    return tf.SwinModel(
        tf.SwinConfig(
            image_size=IMAGE, patch_size=2, embed_dim=hidden // 2, depths=[2, 2], num_heads=[2, 4], window_size=4
        )
    )


def dinov2(hidden: int) -> torch.nn.Module:
    return tf.Dinov2Model(tf.Dinov2Config(**_common(hidden)))


def segformer(hidden: int) -> torch.nn.Module:
    """Two stages of overlapping patches, attention over reduced keys, and the decoder that segments."""
    return tf.SegformerForSemanticSegmentation(
        tf.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[hidden // 2, hidden],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, HEADS], mlp_ratios=[2, 2],
            decoder_hidden_size=hidden, num_labels=5,
        )
    )  # fmt: skip


def clip(hidden: int) -> torch.nn.Module:
    # The vocabulary's last id closes a sentence: CLIP reads the answer at its highest id otherwise.
    text = {
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": VOCABULARY - 1,
        "hidden_size": hidden, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": 4 * hidden,
    }  # fmt: skip
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=_common(hidden), projection_dim=hidden))


def detr_encoder(hidden: int) -> torch.nn.Module:
    """DETR's encoder over the features of an image, without the convolutions before it."""
    config = tf.DetrConfig(
        d_model=hidden, encoder_layers=LAYERS, encoder_attention_heads=HEADS, encoder_ffn_dim=4 * hidden,
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=tf.ResNetConfig(),
    )  # fmt: skip
    return DetrEncoder(config)


def pixels(model: torch.nn.Module) -> Tensors:
    del model
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE)}


def text_and_image(model: torch.nn.Module) -> Tensors:
    return {**text_inputs(model), **pixels(model)}


def dual_axes(inputs: Tensors) -> Axes:
    """Texts and images are counted apart: every text is compared with every image."""
    return {name: {0: "images"} if name == "pixel_values" else {0: "batch", 1: "sequence"} for name in inputs}


def image_features(model: torch.nn.Module) -> Tensors:
    """Return features of an image and their positions, flattened, and a mask without padding."""
    size = model.config.d_model
    return {
        "inputs_embeds": torch.randn(BATCH, SEQUENCE, size),
        "attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
        "spatial_position_embeddings": torch.randn(BATCH, SEQUENCE, size),
    }


def image_features_axes(inputs: Tensors) -> Axes:
    return {name: {0: "batch", 1: "sequence"} for name in inputs}


def _common(hidden: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * hidden,
        "image_size": IMAGE,
        "patch_size": PATCH,
    }


VISION: Families = {
    "vit": Family(vit, pixels, axes=batch_axes),
    "swin": Family(swin, pixels, axes=batch_axes),
    "dinov2": Family(dinov2, pixels, axes=batch_axes),
    "segformer": Family(segformer, pixels, ("logits",), axes=batch_axes),
    "clip": Family(clip, text_and_image, ("logits_per_text", "text_embeds", "image_embeds"), axes=dual_axes),
    "clip-text": Family(lambda hidden: clip(hidden).text_model, text_inputs),
    "clip-vision": Family(lambda hidden: clip(hidden).vision_model, pixels, axes=batch_axes),
    "detr-encoder": Family(detr_encoder, image_features, axes=image_features_axes),
}
