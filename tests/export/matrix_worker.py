"""One process of the matrix: makes the exports of a family, compiles each as its cells ask, and validates on LLVM.

Every finished cell is one line of JSON at the end of a file, so a crash loses the cell that it happened in, no other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.dims import evaluate_dim
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.jobs.inspect import inspect_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.pipeline.validate.validation import validate
from tests.export.matrix_cases import PINNED, SYMBOLIC, Cell, Export, list_cells

# (batch, length) of the runs of a symbolic artifact: ones, primes, 16 and one more, and all positions of the shortest.
SIZES = ((1, 1), (3, 2), (1, 11), (2, 16), (5, 17), (2, 32))
PINNED_SIZE = (2, 11)
SAMPLES = 2
_HIDDEN = 32
# A side of the images, and the sounds, that exports are made with.
_PIXELS, _SAMPLES = 32, 1600
_CACHE_RANK = 4
_DTYPES = {"tensor(int64)": "int64", "tensor(float)": "float32", "tensor(bool)": "bool"}
_REFUSED = "refused by ONNX Runtime"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes
    ----------
    key, family, exporter, opset, dtype, axes, precision
        The cell; `opset` None and `dtype` empty for the exporter's own, `precision` empty for the graph's.
    state
        `validated`, or where it ended: `not exported`, `not imported`, `not compiled`, `refused by ONNX Runtime` (the
        exporter's graph is wrong), `wrong result`, `crashed`.
    reason
        Why it ended there.
    nodes, kernels
        Nodes of the ONNX graph, and kernels it became.
    sizes
        (batch, length) of the validated runs, for symbolic axes.
    max_abs, atol_needed, rtol, atol
        Largest error; smallest absolute tolerance (in units of the output's RMS, if above 1) that would pass; the
        tolerances that were applied.
    cosine, argmax_agreement
        The smallest over outputs and samples.
    seconds
        Of everything, the export itself aside.
    """

    key: str
    family: str
    exporter: str
    opset: int | None
    dtype: str
    axes: str
    precision: str
    state: str
    reason: str = ""
    nodes: int = 0
    kernels: int = 0
    sizes: tuple[tuple[int, int], ...] = ()
    max_abs: float | None = None
    atol_needed: float | None = None
    rtol: float | None = None
    atol: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    seconds: float = 0.0


class _EndedError(Exception):
    """A cell ended before its validation: in which state, and why."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


def outcome_of(cell: Cell, state: str, reason: str = "", **found: object) -> Outcome:
    """Return the outcome of a cell."""
    made = cell.export
    return Outcome(
        cell.key, made.family, made.exporter, made.opset, made.dtype, cell.axes, cell.precision, state, reason,
        **found,  # type: ignore[arg-type]
    )  # fmt: skip


def run_cell(cell: Cell, path: Path, folder: Path) -> Outcome:
    """Return what becomes of a cell whose export is at `path`."""
    started = time.perf_counter()
    found: dict[str, object] = {}
    try:
        _run(cell, path, folder, found)
    except _EndedError as end:
        return outcome_of(cell, end.state, end.reason, seconds=round(time.perf_counter() - started, 1), **found)
    return outcome_of(cell, "validated", seconds=round(time.perf_counter() - started, 1), **found)


def make_export(made: Export, folder: Path) -> Path | str:
    """Return the path of an export, made unless it is there already, or why the exporter cannot make it."""
    path, why = folder / f"{made.name}.onnx", folder / f"{made.name}.why"
    if path.exists() or why.exists():
        return path if path.exists() else why.read_text()
    from tests.export.make_exports import export

    try:
        return export(
            made.family, made.exporter, folder, _HIDDEN, dynamic=made.dynamic, opset=made.opset, dtype=made.dtype
        )
    except Exception as e:  # exporters raise every kind of exception; each is an entry of the matrix
        path.unlink(missing_ok=True)
        why.write_text(_reason(e))
        return _reason(e)


def _run(cell: Cell, path: Path, folder: Path, found: dict[str, object]) -> None:
    with _ends("not imported", lambda: _runtime_refuses_file(path)):
        model = load_model(path)
    found["nodes"] = len(model.proto.graph.node)
    shapes = sized_shapes(model, *PINNED_SIZE) if cell.axes == PINNED else {}
    if cell.axes == SYMBOLIC and all(spec.is_static for spec in model.inputs):
        raise _EndedError("not exported", "the exporter left no axis symbolic")
    request = ModelRequest(
        path, shapes=shapes, target="llvm", lowering=LoweringOptions(precision=cell.precision or None)
    )
    with _ends("not imported", lambda: not _runs(cell, load_model(path))):
        inspection = inspect_model(request)
        if inspection.unsupported:
            raise ValueError("; ".join(f"{node.operator}: {node.reason}" for node in inspection.unsupported))
    # What `inspect` has nothing against compiles: whatever ends a cell from here on is a fault.
    with _ends("not compiled"):
        prepared = prepare_model(request)
    with _ends("not compiled"):
        choices = select_kernels(
            prepared.lowered, prepared.tasks, database=None, target=prepared.target, environment=prepared.environment
        )
        write_artifact(compile_module(prepared.lowered, choices, prepared.target), folder)
    found["kernels"] = len(prepared.lowered.kernels)
    if not (runs := _runs(cell, prepared.model)):
        raise _EndedError(_REFUSED, "it runs at none of the sizes tried")
    with _ends("crashed"):
        reports = _validate(folder, prepared.model, found, runs)
    failed = next((output for report in reports for output in report.outputs if not output.passed), None)
    if failed is not None:
        raise _EndedError("wrong result", f"output {failed.name!r}: {failed.reason}")


def _runs(cell: Cell, model: OnnxModel) -> dict[tuple[int, int], dict[str, int]]:
    """Return the sizes that an artifact is run with, and what they make of each axis: those ONNX Runtime runs.

    An exporter may leave an axis symbolic that has one size, such as the side of an image with learnt positions.
    """
    sizes = {SYMBOLIC: SIZES, PINNED: (PINNED_SIZE,)}.get(cell.axes, (PINNED_SIZE,))
    found = {}
    for size in sizes:
        dims = sized_dims(model, *size)
        with contextlib.suppress(PipelineError):
            Reference(model).run(random_inputs(model, seed=0, dims=dims))
            found[size] = dims
    return found


def _runtime_refuses_file(path: Path) -> bool:
    """Return whether ONNX Runtime does not compute a file either, each of its axes by one size."""
    try:
        session = ort.InferenceSession(path)
        feeds = {}
        for given in session.get_inputs():
            if len(given.shape) == _CACHE_RANK and isinstance(given.shape[2], str):
                return False  # caches: the sizes of its inputs depend on each other
            batch, length = PINNED_SIZE
            shape = [
                size if isinstance(size, int) else length if place else batch for place, size in enumerate(given.shape)
            ]
            feeds[given.name] = np.ones(shape, _DTYPES[given.type])
        session.run(None, feeds)
    except Exception:  # ONNX Runtime's errors have no common base
        return True
    return False


def _validate(
    folder: Path, model: OnnxModel, found: dict[str, object], runs: dict[tuple[int, int], dict[str, int]]
) -> list[ValidationReport]:
    module = Module.load(folder, threads=1)
    found["sizes"] = tuple(runs) if any(runs.values()) else ()
    reports = [validate(module, model, samples=SAMPLES, dims=dims) for dims in runs.values()]
    outputs = [output for report in reports for output in report.outputs]
    for key, measure, pick in (
        ("max_abs", "max_abs", max),
        ("atol_needed", "required_atol", max),
        ("cosine", "cosine", min),
        ("argmax_agreement", "argmax_agreement", min),
    ):
        values = [value for output in outputs if (value := output.worst(measure)) is not None]
        found[key] = float(f"{pick(values):.6g}") if values else None
    found["rtol"], found["atol"] = reports[0].tolerance.rtol, reports[0].tolerance.atol
    return reports


def sized_dims(model: OnnxModel, batch: int, length: int) -> dict[str, int]:
    """Return a size for every symbolic axis of a model's inputs: a batch where it is the first of one.

    The sides of an image and the samples of a sound are the exports' own, or twice as many for a long length.
    """
    own = {"pixel_values": _PIXELS, "input_values": _SAMPLES}
    dims: dict[str, int] = {}
    for spec in model.inputs:
        for place, axis in enumerate(spec.shape):
            if isinstance(axis, str) and axis.isidentifier() and (place == 0 or axis not in dims):
                long = own[spec.name] * (2 if length > PINNED_SIZE[1] else 1) if spec.name in own else length
                dims[axis] = long if place else batch
    return dims


def sized_shapes(model: OnnxModel, batch: int, length: int) -> dict[str, tuple[int | str, ...]]:
    """Return the shape of every input with its symbolic axes as numbers, for `ModelRequest.shapes`."""
    dims = sized_dims(model, batch, length)
    return {spec.name: tuple(evaluate_dim(axis, dims) for axis in spec.shape) for spec in model.inputs}


@contextmanager
def _ends(state: str, refused: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Whatever a stage raises ends the cell in that stage's state, unless ONNX Runtime refuses the graph too."""
    try:
        yield
    except Exception as e:
        raise _EndedError(_REFUSED if refused() else state, _reason(e)) from e


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines[:3]) if lines else "no message"
    return f"{type(error).__name__}: {text[:600]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("lines", type=Path, help="file of finished cells, written at its end")
    parser.add_argument("--exports", type=Path, help="keep the .onnx files here")
    parser.add_argument("--precisions", nargs="*", default=[])
    parser.add_argument("--no-sweeps", action="store_true")
    parser.add_argument("--export-only", action="store_true", help="make the files, and compile none")
    parser.add_argument("--skip", nargs="*", default=[], help="keys of cells that are done")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    skipped = set(args.skip)
    listed = list_cells((args.family,), tuple(args.precisions), sweeps=not args.no_sweeps)
    cells = [cell for cell in listed if cell.key not in skipped]
    with tempfile.TemporaryDirectory(prefix="relaxtune-matrix-") as folder, args.lines.open("a") as lines:
        kept = args.exports or Path(folder)
        for cell in cells:
            # Said first, so that a cell whose process dies is known.
            if not args.export_only:
                print(json.dumps({"begun": cell.key}), file=lines, flush=True)
            path = make_export(cell.export, kept)
            if args.export_only:
                continue
            if isinstance(path, str):
                outcome = outcome_of(cell, "not exported", path)
            else:
                outcome = run_cell(cell, path, Path(folder) / "artifact")
            print(json.dumps(asdict(outcome)), file=lines, flush=True)


if __name__ == "__main__":
    main()
