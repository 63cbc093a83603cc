"""The one door: a zoo name or a path in, a checked `OnnxModel` out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import onnx

from relaxtune.models.axes.relations import bindings_of, check_bounds, find_relations
from relaxtune.models.checks import check_graph, check_signature, check_text, check_versions, sort_nodes
from relaxtune.models.decoder_files import find_files, read_decoder, read_encoder
from relaxtune.models.dims import Dim, evaluate_dim
from relaxtune.models.errors import ModelShapeError, UnsupportedModelError
from relaxtune.models.external_data import check_external_data, inline_external_data
from relaxtune.models.hub.folder import HUB_PREFIX, model_path
from relaxtune.models.inference import check_and_infer, check_expansion
from relaxtune.models.onnx_model import OnnxModel, content_sha256
from relaxtune.models.shapes import Shapes, bind_shapes, name_unknown_axes, pin_shapes, signature_of
from relaxtune.models.spec import AxisRelation
from relaxtune.models.zoo.graph import Precision
from relaxtune.models.zoo.presets import DEFAULT_DIMS, Preset, get_preset, list_models

log = logging.getLogger(__name__)


def load_model(
    source: str | Path,
    *,
    shapes: Shapes | None = None,
    precision: str | None = None,
    seed: int = 0,
    any_operator: bool = False,
) -> OnnxModel:
    """Return a model of the zoo, of a user's `.onnx` file or of a folder, checked and with its shapes pinned.

    Raises `ModelError`: every leaf of `models.errors`.

    Parameters
    ----------
    source
        A path to an `.onnx` file; a folder in the hub's layout, or `hf:ORG/NAME`, which are exported once; or a name
        from `list_models()`, with `:fp16` behind it for the graph in that precision (`bert-base:fp16`). Of a merged
        decoder's file, the branch with past is taken; of a folder with an encoder's file, the part from its inputs to
        all that the decoder's step needs (`models.decoder_files`).
    shapes
        Input name to shape, numbers or names; or the name of an axis to its one size in all inputs. For a zoo name the
        axes of any one input decide the whole graph (batch 1, sequence 128 and past_sequence 127 where nothing is
        said). For a file, axes of one name are pinned everywhere.
    precision
        "fp32" or "fp16": what a zoo model is built in (when None, as its name says, else fp32). A file keeps the
        precision it has.
    seed
        Seed of a zoo model's weights.
    any_operator
        Whether a file may have operators of unknown domains, as for listing what cannot be imported.
    """
    if _is_path(source):
        return _load_file(model_path(source), shapes or {}, any_operator=any_operator)
    name, _, suffix = str(source).partition(":")
    given = _parse_precision(precision or suffix or None)
    # A survey of operators comes before the load that counts.
    return _load_zoo(str(source), get_preset(name), shapes or {}, given, seed, quiet=any_operator)


def _is_path(source: str | Path) -> bool:
    """Tell a path from a zoo name; a zoo name wins over a file of the same name that has no folder in front."""
    if isinstance(source, Path) or source.endswith(".onnx") or source.startswith(HUB_PREFIX):
        return True
    separators = "/" in source or "\\" in source
    return separators or (source not in list_models() and bool(source) and Path(source).exists())


def _load_file(path: Path, shapes: Shapes, *, any_operator: bool) -> OnnxModel:
    files = find_files(path) if any(path.glob("*encoder*.onnx")) else None
    proto = read_decoder(path) if files is None or files.encoder is None else read_encoder(files)
    check_text(proto)
    check_expansion(proto)
    check_versions(proto)
    name_unknown_axes(proto.graph)
    check_signature(proto)
    sort_nodes(proto.graph)
    check_graph(proto, operators=not any_operator)
    folder = path.absolute() if path.is_dir() else path.absolute().parent
    all_inline = inline_external_data(proto, folder, check_external_data(proto, folder))
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = signature_of([value for value in proto.graph.input if value.name not in weights], "input")
    bound = bind_shapes(inputs, shapes, path.name)
    if any(isinstance(size, int) for size in bound.values()):
        check_bounds(find_relations(proto), bound, f"model {path.name}")
    pin_shapes(proto, bound)
    check_and_infer(proto)
    relations = find_relations(proto)
    bindings = bindings_of(relations)
    if bindings:
        log.info("%s: %s", path.name, "; ".join(map(str, relations)))
        pin_shapes(proto, bindings)
        check_and_infer(proto)
    data_dir = None if all_inline else folder
    return make_model(path.stem, proto, path=path, data_dir=data_dir, relations=relations)


def _load_zoo(name: str, preset: Preset, shapes: Shapes, precision: Precision, seed: int, *, quiet: bool) -> OnnxModel:
    dims: dict[str, Dim] = {
        axis: DEFAULT_DIMS[axis]
        for spec in preset.inputs
        for axis in spec.shape
        if isinstance(axis, str) and axis in DEFAULT_DIMS
    }
    named = bind_shapes(preset.inputs, shapes, preset.name)
    fixed = ", ".join(f"{axis} {size}" for axis, size in dims.items() if axis not in named)
    if fixed and not quiet:
        log.info("zoo model %s: %s; --dim AXIS=SIZE sets another size, --shape IN=AxB leaves A and B free", name, fixed)
    dims.update(named)
    for dim, limit in preset.limits.items():
        value = evaluate_dim(dim, {key: number for key, number in dims.items() if isinstance(number, int)})
        if isinstance(value, int) and value > limit:
            msg = f"dimension {dim!r} of zoo model {preset.name!r} is {value}, expected at most {limit}"
            raise ModelShapeError(msg)
    proto = preset.build(name, dims, precision, seed)
    check_and_infer(proto)
    return make_model(name, proto, path=None, data_dir=None, seed=seed, relations=find_relations(proto))


def make_model(
    name: str,
    proto: onnx.ModelProto,
    *,
    path: Path | None,
    data_dir: Path | None,
    seed: int | None = None,
    relations: tuple[AxisRelation, ...] = (),
) -> OnnxModel:
    """Return the model's value from a checked proto: its hash and its signature."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    return OnnxModel(
        name=name,
        proto=proto,
        path=path,
        sha256=content_sha256(proto, data_dir),
        inputs=signature_of([value for value in proto.graph.input if value.name not in weights], "input"),
        outputs=signature_of(proto.graph.output, "output"),
        data_dir=data_dir,
        seed=seed,
        relations=relations,
    )


def _parse_precision(precision: str | None) -> Precision:
    if precision is None:
        return Precision.FP32
    try:
        return Precision(precision)
    except ValueError as e:
        msg = f"precision {precision!r} is not known; expected one of {', '.join(p.value for p in Precision)}"
        raise UnsupportedModelError(msg) from e


def open_axes(source: str | Path, axes: Sequence[str], shapes: Shapes) -> dict[str, Sequence[Dim]]:
    """Return shape overrides in which the axes of buckets are symbolic; those of a zoo model have numbers otherwise.

    A file's axes are what they are, and an axis that the overrides name stays as they say.
    """
    opened = dict(shapes)
    name = str(source).partition(":")[0]
    if name not in list_models():
        return opened
    for axis in axes:
        if axis in opened or any(axis in shape for shape in opened.values()):
            continue
        spec = next((s for s in get_preset(name).inputs if axis in s.shape and s.name not in opened), None)
        if spec is not None:
            opened[spec.name] = [item if item in axes else DEFAULT_DIMS.get(str(item), item) for item in spec.shape]
    return opened
