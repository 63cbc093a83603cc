"""The cells of a plan: each model in one shape, in one precision, for one target."""

from __future__ import annotations

import glob
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from relaxtune.models import ModelError, parse_shape_override
from relaxtune.models.buckets import list_symbols, parse_bucket
from relaxtune.models.dims import Dim
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.files import read_proto
from relaxtune.models.hub.folder import HUB_PREFIX, content_hash, is_folder
from relaxtune.models.onnx_model import content_sha256
from relaxtune.models.zoo import get_preset
from relaxtune.pipeline.batch.plan import (
    OWN_PRECISION,
    PRECISIONS,
    CellsTable,
    DefaultsTable,
    LimitsTable,
    Place,
    Plan,
    nearest,
    plan_error,
)
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.acceptance import Limits
from relaxtune.schedules.errors import ScheduleError
from relaxtune.schedules.targets import resolve_target

#: Cells of one plan, and folders that one of its globs may go through.
CELLS_MAX = 10_000
FOLDERS_MAX = 20_000

#: Called with each line of progress.
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One artifact that a plan asks for."""

    name: str  # Unique in the plan; the artifact's directory in the plan's folder `out`.
    # As the plan says them; of a file, `source` is its path. `shape` "" keeps the model's own, `precision` `graph` the
    # graph's dtypes.
    source: str
    shape: str
    buckets: tuple[str, ...]
    precision: str
    target: str
    importance: int  # How many times each call of its kernels counts.
    limits: Limits  # Of its artifact.
    tags: tuple[str, ...]
    seed: int = 0  # Of the weights of a zoo model.

    @property
    def request(self) -> ModelRequest:
        """The request to the pipeline."""
        return ModelRequest(
            source=self.source,
            shapes=_parse_shape(self.shape),
            target=self.target,
            lowering=LoweringOptions(precision=None if self.precision == OWN_PRECISION else self.precision),
            seed=self.seed,
            buckets=dict(map(parse_bucket, self.buckets)),
        )


def source_key(source: str) -> str:
    """Return what tells models apart before import: the sha256 of a file or folder, a zoo model's or the hub's name."""
    path = Path(source)
    if path.is_dir():
        return content_hash(path)
    if not path.is_file():
        return source
    status = path.stat()
    return _content_key(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _content_key(path: Path, _changed_ns: int, _size: int) -> str:
    try:
        return content_sha256(read_proto(path), path.parent)
    except (ModelError, OSError):
        # The import will say what is wrong with it.
        return hashlib.sha256(path.read_bytes()).hexdigest()


def list_cells(plan: Plan, on_progress: OnProgress = lambda _: None) -> tuple[Cell, ...]:
    """Return the cells of a plan, in its order. No model is loaded.

    Raises `PlanError`: a model, shape, bucket, precision or target is not known, a cell is there twice, or there are
    too many.
    """
    table = plan.table
    count = 0
    faults = _faults_of(plan, table.defaults, ("defaults",))
    places: dict[tuple[object, ...], Place] = {}
    cells: list[Cell] = []
    for number, matrix in enumerate(table.cells):
        place: Place = ("cells", number)
        faults += _faults_of(plan, matrix, place)
        sources: list[str] = []
        for text in matrix.models:
            found = _find_models(plan, text, on_progress)
            sources += found if isinstance(found, list) else []
            if isinstance(found, str):
                faults.append(plan.fault((*place, "models"), found, text))
        count += len(sources) * math.prod(map(len, _axes(plan, matrix)))
        if count > CELLS_MAX:
            faults.append(
                plan.fault(place, f"there are {count} cells up to here; a plan has at most {CELLS_MAX}: split it")
            )
        if faults:
            continue
        faults += _unknown_inputs(plan, sources, matrix, place)
        for cell in _expand(plan, matrix, sources):
            key = (cell.source, cell.shape, cell.buckets, cell.precision, cell.target)
            if key in places:
                line = plan.lines.find(places[key])
                parts = (Path(cell.source).stem, cell.shape, cell.precision, cell.target)
                twice = " ".join(filter(None, parts))
                faults.append(plan.fault(place, f"{twice} is there twice, also at line {line}; keep one of them"))
                continue
            places[key] = place
            cells.append(cell)
    if faults:
        raise plan_error(faults)
    return tuple(replace(cell, name=name) for cell, name in zip(cells, _names(cells), strict=True))


def _axes(plan: Plan, matrix: CellsTable) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    defaults = plan.table.defaults
    return (
        matrix.shapes or defaults.shapes or [""],
        matrix.precisions or defaults.precisions or [OWN_PRECISION],
        matrix.targets or defaults.targets or ["auto"],
    )


def _expand(plan: Plan, matrix: CellsTable, sources: Sequence[str]) -> Iterator[Cell]:
    defaults = plan.table.defaults
    limits = {**_given(defaults.limits), **_given(matrix.limits)}
    for source, shape, precision, target in itertools.product(sources, *_axes(plan, matrix)):
        yield Cell(
            name="",
            source=source,
            shape=shape,
            buckets=tuple(defaults.buckets or () if matrix.buckets is None else matrix.buckets),
            precision=precision,
            target=target,
            importance=matrix.importance or defaults.importance or 1,
            limits=Limits(**limits),
            tags=tuple(dict.fromkeys([*(defaults.tags or ()), *(matrix.tags or ())])),
            seed=plan.table.seed,
        )


def _given(limits: LimitsTable) -> dict[str, float]:
    return {name: float(value) for name, value in limits.model_dump().items() if value is not None}


def _find_models(plan: Plan, text: str, on_progress: OnProgress) -> list[str] | str:
    """Return what a text of `models` names, or what is wrong with it."""
    if text.startswith(HUB_PREFIX):
        return [text]
    if not text.endswith(".onnx") and "/" not in text:
        try:
            get_preset(text.partition(":")[0])
        except ModelError as e:
            return str(e)
        return [text]
    path = plan.path.parent / text
    if glob.has_magic(text):
        return _matching(str(path), on_progress) or f"no file matches {text!r} in {plan.path.parent.absolute()}"
    if path.is_file() or path.is_dir():
        return [str(path)]
    near = nearest(path.name, [file.name for file in path.parent.glob("*.onnx")])
    return f"there is no file {path}{near or '; expected an .onnx file, relative to the plan, or a zoo name'}"


def _matching(pattern: str, on_progress: OnProgress) -> list[str] | str:
    """Return the files that a pattern matches, or which limit it goes beyond. Folders are counted from `**/` on."""
    head, _, rest = pattern.partition("/**/")
    folders = glob.iglob(f"{head}/**/", recursive=True) if rest else ("",)
    found: set[str] = set()
    for count, folder in enumerate(folders, 1):
        on_progress(f"models that match {pattern}: {len(found)} in {count} folders so far")
        if count > FOLDERS_MAX:
            return f"matching goes through more than {FOLDERS_MAX} folders; name a folder nearer to the models"
        here = glob.iglob(glob.escape(folder) + rest if rest else pattern, recursive=True)
        found.update(itertools.islice(here, CELLS_MAX + 1))
        if len(found) > CELLS_MAX:
            return f"more than {CELLS_MAX} files match; a plan has at most {CELLS_MAX} cells: split it"
    return sorted(found)


def _faults_of(plan: Plan, table: DefaultsTable, place: Place) -> list[str]:
    found: list[str] = []
    parse: dict[str, Callable[[str], object]] = {
        "shapes": _parse_shape,
        "buckets": parse_bucket,
        "targets": resolve_target,
    }
    for key, read in parse.items():
        for text in getattr(table, key) or ():
            try:
                read(text)
            except (ModelError, ScheduleError) as e:
                found.append(plan.fault((*place, key), str(e), text))
    for precision in table.precisions or ():
        if precision not in PRECISIONS:
            fault = f"unknown precision {precision!r}; expected one of {', '.join(PRECISIONS)}"
            found.append(plan.fault((*place, "precisions"), fault + nearest(precision, PRECISIONS), precision))
    return found


def _unknown_inputs(plan: Plan, sources: Sequence[str], matrix: CellsTable, place: Place) -> list[str]:
    """Return which shapes name inputs and axes that a zoo model does not have; a file tells when it is loaded."""
    found = []
    zoo = [source for source in sources if not source.endswith(".onnx") and not is_folder(source)]
    presets = [get_preset(source.partition(":")[0]) for source in zoo]
    own = matrix.shapes is not None
    for shape in matrix.shapes or plan.table.defaults.shapes or ():
        for preset in presets:
            known = [spec.name for spec in preset.inputs] + list_symbols(preset.inputs)
            for name in _parse_shape(shape).keys() - set(known):
                fault = f"{preset.name} has no input and no axis {name!r}; expected {', '.join(known)}"
                fault += nearest(name, known)
                found.append(plan.fault((*(place if own else ("defaults",)), "shapes"), fault, shape))
    return found


def _parse_shape(text: str) -> dict[str, tuple[Dim, ...]]:
    parts = [parse_shape_override(part) for part in text.split(",")] if text else []
    twice = [name for name, count in Counter(name for name, _ in parts).items() if count > 1]
    if twice:
        raise ModelShapeError(f"shape {text!r} names input {twice[0]!r} twice; give each input once")
    return dict(parts)


def _names(cells: Sequence[Cell]) -> list[str]:
    short = []
    for cell in cells:
        # The sizes alone, where all inputs have the same.
        sizes = {part.rpartition("=")[2].strip() for part in cell.shape.split(",")}
        short.append(_name(cell, Path(cell.source).stem, sizes.pop() if len(sizes) == 1 else cell.shape))
    counts = Counter(short)
    long = [
        name if counts[name] == 1 else _name(cell, "-".join(Path(cell.source).with_suffix("").parts[-2:]), cell.shape)
        for cell, name in zip(cells, short, strict=True)
    ]
    counts, seen = Counter(long), Counter[str]()
    names = []
    for name in long:
        seen[name] += 1
        names.append(name if counts[name] == 1 else f"{name}-{seen[name]}")
    return names


def _name(cell: Cell, model: str, shape: str) -> str:
    parts = [model, shape, *cell.buckets, cell.precision.replace(OWN_PRECISION, ""), cell.target]
    return "-".join(filter(None, (re.sub(r"[^A-Za-z0-9_.]+", "-", part).strip("-") for part in parts)))
