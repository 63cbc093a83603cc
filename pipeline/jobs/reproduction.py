"""The smallest reproducer of a fault: a model, its inputs, and a script that exits 3 while the fault is there.

Tried in this order, the first that shows the fault is kept: the ONNX nodes to blame alone, their inputs taken from the
run in which the fault was found; the graph up to the first wrong tensor; the whole model; the artifact as it is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from relaxtune.models import OnnxModel, load_model, save_model
from relaxtune.models.errors import ModelError
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bisect.result import Bisection
from relaxtune.pipeline.bisect.subject import lowering_options
from relaxtune.pipeline.bisect.tensors import OnnxTensors, onnx_tensors
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.precision.onnx_weights import label_of
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.validation import validate
from relaxtune.tuning_db.urls import DatabasePlace, without_secrets

logger = logging.getLogger(__name__)

MODEL_FILE, INPUTS_FILE, SCRIPT_FILE = "model.onnx", "inputs.npz", "reproduce.py"
# A larger model is named by its path in the script, and no part is cut out of it.
_COPIED_BYTES_MAX = 512 * 2**20


@dataclass(frozen=True)
class Reproduction:
    """A reproduction: the folder, its script, and what it holds (`nodes`, `prefix`, `model` or `artifact`)."""

    folder: Path
    script: Path
    part: str
    onnx_nodes: int


def write_reproduction(
    bisection: Bisection,
    manifest: Manifest,
    artifact: Path,
    model: OnnxModel,
    inputs: Mapping[str, np.ndarray],
    tolerance: Tolerance,
    folder: Path,
    *,
    database: DatabasePlace | None = None,
) -> Reproduction:
    """Write the smallest reproduction of a fault that was found, and return what it is.

    An older reproduction in `folder` is replaced. Kernels come from `database`; without one they are those of a model
    that was not tuned.
    Raises `PipelineError`: the folder exists and holds something else.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SCRIPT_FILE).is_file():
        raise PipelineError(
            f"{folder} is not empty and holds no {SCRIPT_FILE}, so it is not replaced; name another folder with --repro"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = onnx_tensors(model, inputs, manifest.policy)
    options = lowering_options(manifest)
    request = _Request(manifest.target.config, options, database, tolerance)
    for part, labels, results in _parts(bisection, tensors):
        cut = _cut(model, tensors, labels, results)
        if cut is None:
            continue
        proto, given = cut
        path = folder / MODEL_FILE
        onnx.save(proto, str(path))
        if request.shows_fault(path, given):
            logger.info("reproduction: %d of %d ONNX nodes show the fault", len(proto.graph.node), len(tensors.nodes))
            script = _write(folder, given, request, model=MODEL_FILE, artifact=None, bisection=bisection)
            return Reproduction(folder, script, part, len(proto.graph.node))
        path.unlink()
    # A large model stays where it is.
    if model.path is not None and model.weight_bytes > _COPIED_BYTES_MAX:
        source = str(model.path.absolute())
    else:
        source = MODEL_FILE
        save_model(model, folder / MODEL_FILE)
    where = folder / source
    if request.shows_fault(where, inputs):
        script = _write(folder, inputs, request, model=source, artifact=None, bisection=bisection)
        return Reproduction(folder, script, "model", len(tensors.nodes))
    logger.info("reproduction: compiled again, the model is right; the script runs the artifact as it is")
    script = _write(folder, inputs, request, model=source, artifact=str(artifact.absolute()), bisection=bisection)
    return Reproduction(folder, script, "artifact", len(tensors.nodes))


@dataclass(frozen=True)
class _Request:
    """How a model is compiled to show the fault."""

    target: str
    options: LoweringOptions
    database: DatabasePlace | None
    tolerance: Tolerance

    def shows_fault(self, path: Path, inputs: Mapping[str, np.ndarray]) -> bool:
        """Whether a model, compiled now, gives wrong results; False also for one that cannot be compiled."""
        try:
            report = run_again(path, inputs, self.target, self.options, self.tolerance, database=self.database)
        except (PipelineError, ModelError) as e:
            logger.debug("no reproduction with %s: %s", path, e)
            return False
        return not report.passed


def run_again(
    path: Path,
    inputs: Mapping[str, np.ndarray],
    target: str,
    options: LoweringOptions,
    tolerance: Tolerance,
    *,
    database: DatabasePlace | None = None,
    artifact: str | None = None,
) -> ValidationReport:
    """Return how a model compares with ONNX Runtime, compiled now or as an `artifact` that is there."""
    model = load_model(path)
    given = {spec.name: inputs[spec.name].astype(numpy_dtype(spec.dtype), copy=False) for spec in model.inputs}
    with temporary_folder() as made:
        place = Path(artifact or Path(made) / "artifact")
        if artifact is None:
            compile_model(ModelRequest(path, target=target, lowering=options), place, database=database, samples=0)
        return validate(Module.load(place), model, rtol=tolerance.rtol, atol=tolerance.atol, inputs=[given], repeats=1)


def _parts(bisection: Bisection, tensors: OnnxTensors) -> list[tuple[str, frozenset[str], tuple[str, ...]]]:
    """Return (name, node labels, tensors to compare) of the parts of the graph that may show the fault."""
    blamed = frozenset(bisection.nodes) | frozenset(bisection.kernel.onnx_nodes if bisection.kernel else ())
    parts: list[tuple[str, frozenset[str], tuple[str, ...]]] = [("nodes", blamed, ())] if blamed else []
    if bisection.tensor is not None:
        before = frozenset(node.label for node in tensors.makers(bisection.tensor))
        parts.append(("prefix", before, (bisection.tensor,)))
    return [(part, labels, results) for part, labels, results in parts if len(labels) < len(tensors.nodes)]


def _cut(
    model: OnnxModel, tensors: OnnxTensors, labels: frozenset[str], results: Iterable[str]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]] | None:
    """Return the nodes with the given labels as a model of its own, and its inputs; None where types are not known."""
    if model.weight_bytes > _COPIED_BYTES_MAX:
        return None
    proto = model.inline_proto()
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    values = (*inferred.input, *inferred.output, *inferred.value_info)
    types = {one.name: one.type.tensor_type.elem_type for one in values if one.type.tensor_type.elem_type}
    graph = proto.graph
    reads = [name for node in graph.node if label_of(node) in labels for name in node.input if name]
    kept = {node.label for name in reads for node in tensors.constant_makers(name)} | set(labels)
    nodes = [node for node in graph.node if label_of(node) in kept]
    written = {name for node in nodes for name in node.output}
    weights = {tensor.name for tensor in graph.initializer}
    read = {name for node in nodes for name in node.input if name}
    given = [name for name in tensors.values if name in read - written - weights]
    elsewhere = {name for node in graph.node if label_of(node) not in kept for name in node.input} | set(
        tensors.outputs
    )
    of_labels = {name for node in nodes if label_of(node) in labels for name in node.output if name}
    wanted = [*results] or [name for name in tensors.values if name in of_labels and name in elsewhere]
    wanted = wanted or [name for name in tensors.values if name in of_labels - read]
    if not wanted or not given or any(name not in types for name in (*given, *wanted)):
        return None
    dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(types[name]) for name in given}
    inputs = {name: tensors.values[name].astype(dtype) for name, dtype in dtypes.items()}
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    del part.graph.node[:], part.graph.input[:], part.graph.output[:], part.graph.value_info[:]
    del part.graph.initializer[:]
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    make = onnx.helper.make_tensor_value_info
    part.graph.input.extend(make(name, types[name], inputs[name].shape) for name in given)
    part.graph.output.extend(make(name, types[name], tensors.values[name].shape) for name in wanted)
    return part, inputs


def _write(
    folder: Path,
    inputs: Mapping[str, np.ndarray],
    request: _Request,
    *,
    model: str,
    artifact: str | None,
    bisection: Bisection,
) -> Path:
    # bfloat16 has no name of its own in a .npz file; the script casts to what the model takes.
    half = numpy_dtype("bfloat16")
    arrays = {name: array.astype(np.float32) if array.dtype == half else array for name, array in inputs.items()}
    np.savez(folder / INPUTS_FILE, **arrays)  # type: ignore[arg-type]  # the stub takes every keyword for `allow_pickle`
    script = folder / SCRIPT_FILE
    options = request.options
    text = _SCRIPT.format(
        summary=bisection.summary.replace('"""', "'''"),
        model=model,
        inputs=INPUTS_FILE,
        artifact=artifact,
        database=request.database and without_secrets(request.database),
        target=request.target,
        precision=options.precision,
        group=options.group_size,
        disabled=sorted(options.disabled_passes),
        embed=options.embed_weights,
        calibration=options.calibration,
        unpad=options.unpad,
        rtol=request.tolerance.rtol,
        atol=request.tolerance.atol,
    )
    script.write_text(text, encoding="utf-8")
    return script


_SCRIPT = '''"""Show a fault that `relaxtune validate --bisect` found; exits 3 while it is there, 0 when it is gone.

{summary}
"""

import sys
from pathlib import Path

import numpy as np

from relaxtune.pipeline.jobs.reproduction import run_again
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.precision.calibration import StaticScales
from relaxtune.pipeline.validate.tolerances import Tolerance

HERE = Path(__file__).resolve().parent
report = run_again(
    HERE / {model!r},
    np.load(HERE / {inputs!r}),
    {target!r},
    LoweringOptions(
        precision={precision!r},
        group_size={group!r},
        disabled_passes=frozenset({disabled!r}),
        embed_weights={embed!r},
        calibration={calibration!r},
        unpad={unpad!r},
    ),
    Tolerance(rtol={rtol!r}, atol={atol!r}),
    database={database!r},
    # The compiled artifact itself, where the fault is in it and not in what is compiled now.
    artifact={artifact!r},
)
for output in report.outputs:
    print(output.name, "ok" if output.passed else output.reason)
sys.exit(0 if report.passed else 3)
'''
