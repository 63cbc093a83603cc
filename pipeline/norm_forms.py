"""Norms inside the matmuls around them, or apart: both forms of a model compete where fusing may not pay.

Taking a norm into matmuls saves a kernel and makes the matmuls' epilogues longer; which is faster depends on the rows,
the widths and the device. `LoweringOptions.norm_rows_max` is a guess for models that nobody measured. A tuning run
that is asked to (`TuningOptions.norm_forms`) lowers the other forms too, tunes the kernels of all, and times the whole
models by turns. The form that won is recorded as a workload of its own, the model: its latencies are the model's, and
`relaxtune compile` takes the same form from the record.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tvm

from pipeline.environment import target_key
from pipeline.errors import LoweringError
from pipeline.measure import BenchmarkReport, measure
from pipeline.model_arm import compiled_arm
from pipeline.paired_gain import paired_gain
from pipeline.passes import lower
from pipeline.prepare import PreparedModel
from pipeline.rerank import is_gain
from pipeline.selection import KernelChoice
from pipeline.tuning.task import TuningTask
from pipeline.tuning.tasks import extract_tasks, list_untunable
from tuning_db.records import Route, Status, TuningRecord, Workload, canonical_json, content_key
from tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

PASS = "fuse_norms"
# Rows of a matmul up to which norms are taken into it, by the form's name.
FORMS: Mapping[str, int] = {"norms in matmuls": 1 << 31, "norms apart": 0}
_DECISION = "norm_forms"
_RUNS = 40
# The probability with which a form that is taken may be no faster.
_DOUBT = 0.01
_BEFORE, _AFTER = "as lowered, before", "as lowered, after"
_US_PER_MS = 1e3
_LISTED = 64


@dataclass(frozen=True)
class FormTrial:
    """One form of the model, timed whole: its name, kernels launched, median latency, and whether it was taken."""

    form: str
    launches: int
    model_ms: float
    taken: bool


@dataclass(frozen=True)
class NormFormsReport:
    """What came of timing the forms; `noise` is the relative difference of the default's medians, before and after."""

    trials: tuple[FormTrial, ...]
    noise: float

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data."""
        return {"noise": self.noise, "trials": [asdict(trial) for trial in self.trials]}


def other_forms(prepared: PreparedModel) -> dict[str, PreparedModel]:
    """Return the model in the forms that differ from the one it was lowered to, by the form's name.

    None where the pass is switched off, where no norm can be taken into matmuls, and for models with buckets, whose
    modules share weights.
    """
    options = prepared.lowered.options
    if prepared.buckets or PASS in options.disabled_passes or prepared.target.kind != "cuda":
        return {}
    seen = {_kernels_key(prepared)}
    found = {}
    for name, rows_max in FORMS.items():
        form = in_form(prepared, rows_max)
        if _kernels_key(form) not in seen:
            seen.add(_kernels_key(form))
            found[name] = form
    return found


def in_form(prepared: PreparedModel, rows_max: int) -> PreparedModel:
    """Return a model with norms taken into matmuls of so many rows at most."""
    options = replace(prepared.lowered.options, norm_rows_max=rows_max)
    lowered = lower(prepared.lowered.graph, prepared.target.target, options)
    tasks, untunable = tuple(extract_tasks([lowered])), tuple(list_untunable([lowered]))
    return replace(prepared, lowered=lowered, tasks=tasks, untunable=untunable)


def with_common_tasks(forms: Sequence[PreparedModel]) -> list[PreparedModel]:
    """Return the forms with tasks that have one name in all of them, as tuning them together needs."""
    named = [_named(form, f"{form.model.name} ({number})") for number, form in enumerate(forms)]
    tasks = extract_tasks([form.lowered for form in named])
    return [
        replace(form, tasks=tuple(_task_of(task, one, form.model.name) for task in tasks if _runs(task, one)))
        for form, one in zip(forms, named, strict=True)
    ]


def all_tasks(forms: Sequence[PreparedModel]) -> tuple[TuningTask, ...]:
    """Return the tasks of all forms, each once."""
    return tuple({task.workload_hash: task for form in reversed(forms) for task in form.tasks}.values())


def _named(form: PreparedModel, name: str) -> PreparedModel:
    return replace(form, lowered=replace(form.lowered, graph=replace(form.lowered.graph, name=name)))


def _runs(task: TuningTask, form: PreparedModel) -> bool:
    return form.lowered.graph.name in task.functions


def _task_of(task: TuningTask, form: PreparedModel, model: str) -> TuningTask:
    functions = task.functions[form.lowered.graph.name]
    weight = sum(len(form.lowered.kernels[function]) for function in functions)
    return replace(task, functions={model: functions}, weight=weight)


def choose_form(
    forms: Mapping[str, tuple[PreparedModel, tuple[KernelChoice, ...]]],
    default: str,
    database: TuningDatabase,
    *,
    seed: int,
    job_id: str | None,
) -> tuple[str, NormFormsReport]:
    """Return the form whose whole model is the fastest, and what each takes; the database has it recorded.

    Parameters
    ----------
    forms : mapping
        Form -> the model in it, with the choices of its kernels.
    default : str
        The form that the model was lowered to: another must surely be faster than it, see `pipeline.paired_gain`.
    """
    prepared, choices = forms[default]
    launches = {}
    with tempfile.TemporaryDirectory(prefix="relaxtune-forms-") as folder:
        first = compiled_arm(prepared, choices, Path(folder) / "default")
        arms = {_BEFORE: first}
        for number, (name, (form, chosen)) in enumerate(forms.items()):
            launches[name] = sum(map(len, form.lowered.kernels.values()))
            if name != default:
                try:
                    arms[name] = compiled_arm(form, chosen, Path(folder) / str(number))
                except LoweringError as e:
                    _record(prepared, database, name, seed, job_id, error=str(e))
                    logger.warning("%s: %s", name, e)
        arms[_AFTER] = first
        report = measure(arms, runs=_RUNS)
    before, after = report.arm(_BEFORE), report.arm(_AFTER)
    gains = {
        name: paired_gain(report.arm(name).latencies_ms, before.latencies_ms, after.latencies_ms, doubt=_DOUBT)
        for name in forms
        if name in arms
    }
    medians = {default: (before.median_ms + after.median_ms) / 2} | {name: report.arm(name).median_ms for name in gains}
    taken = max((name for name in gains if is_gain(gains[name])), key=lambda name: gains[name].median, default=default)
    _record(prepared, database, taken, seed, job_id, latencies_ms=_latencies(report, taken, default))
    trials = tuple(FormTrial(name, launches[name], ms, name == taken) for name, ms in medians.items())
    for trial in trials:
        logger.info("%s: %d kernels, %.4f ms%s", trial.form, trial.launches, trial.model_ms, ", taken" * trial.taken)
    return taken, NormFormsReport(trials, abs(before.median_ms - after.median_ms) / medians[default])


def default_form(prepared: PreparedModel) -> str:
    """Return what the form is called that a model was lowered to: a form's own name, or "by rows"."""
    rows_max = prepared.lowered.options.norm_rows_max
    return next((name for name, most in FORMS.items() if most == rows_max), f"norms in matmuls of {rows_max} rows")


def in_recorded_form(prepared: PreparedModel, database: TuningDatabase) -> PreparedModel:
    """Return the model in the form that the newest record true here says was the fastest; as it is without one."""
    workload = _workload(prepared)
    records = database.list_top(
        workload_hash=workload.workload_hash,
        signature_key=workload.signature_key,
        target=target_key(prepared.target),
        environment=prepared.environment,
        k=_LISTED,
    )
    newest = max(records, key=lambda record: (record.created_at, record.id or 0), default=None)
    if newest is None:
        return prepared
    decision = json.loads(newest.decision)
    logger.info("%s, as record %s of %s says", decision["form"], newest.id, newest.environment.device_name)
    rows_max = decision["norm_rows_max"]
    return prepared if rows_max == prepared.lowered.options.norm_rows_max else in_form(prepared, rows_max)


def _kernels_key(prepared: PreparedModel) -> str:
    tasks = sorted((task.workload_hash, task.weight) for task in prepared.tasks)
    return content_key([tasks, sorted((one.name, one.calls) for one in prepared.untunable)])


def _workload(prepared: PreparedModel) -> Workload:
    """Return the model as a workload: the kernels of its default form, by their own hashes."""
    key = _kernels_key(prepared)
    return Workload(
        workload_hash=key,
        family="model",
        signature=canonical_json({"family": "model", "kernels": key}),
        name=prepared.model.name,
        flops=sum(task.flops * task.weight for task in prepared.tasks),
        bytes=sum(task.bytes * task.weight for task in prepared.tasks),
        ir_json=None,
        tvm_version=tvm.__version__,
    )


def _record(
    prepared: PreparedModel,
    database: TuningDatabase,
    form: str,
    seed: int,
    job_id: str | None,
    *,
    latencies_ms: Sequence[float] = (),
    error: str | None = None,
) -> None:
    workload = _workload(prepared)
    rows_max = FORMS.get(form, prepared.lowered.options.norm_rows_max)
    record = TuningRecord(
        workload_hash=workload.workload_hash,
        signature_key=workload.signature_key,
        target=target_key(prepared.target),
        environment=prepared.environment,
        route=Route.TEMPLATE,
        decision=canonical_json({"template": _DECISION, "form": form, "norm_rows_max": rows_max}),
        status=Status.OK if error is None else Status.BUILD_ERROR,
        latencies_us=tuple(ms * _US_PER_MS for ms in latencies_ms),
        error=error,
        seed=seed,
        job_id=job_id,
    )
    database.record_all(workloads=[workload], records=[record])


def _latencies(report: BenchmarkReport, taken: str, default: str) -> tuple[float, ...]:
    names = (_BEFORE, _AFTER) if taken == default else (taken,)
    return tuple(ms for name in names for ms in report.arm(name).latencies_ms)
