"""Norms inside the matmuls around them, or apart: both forms of a model compete where fusing may not pay.

Taking a norm into matmuls saves a kernel and makes the matmuls' epilogues longer; which is faster depends on the rows,
the widths and the device. `LoweringOptions.norm_rows_max` is a guess for models that were not measured. A tuning run
with `TuningOptions.norm_forms` lowers the other forms too, tunes the kernels of all, and times the whole
models alternately. The form that won is recorded as a measurement of the model (`pipeline.choose.model_records`), so
that `relaxtune compile` takes it too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.model_arm import compiled_arm
from relaxtune.pipeline.choose.model_records import MeasuredModel, ModelDecision, kernels_key
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.experiment.experiment import LEAST_GAIN, Question, Side, run_experiment
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.prepare import PreparedModel, list_tasks
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.workers.machine_faults import is_of_the_machine
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

PASS = "fuse_norms"
# Rows of a matmul up to which norms are taken into it, by the form's name.
FORMS: Mapping[str, int] = {"norms in matmuls": 1 << 31, "norms apart": 0}
# A form that is taken may be no faster with a probability of 1 %.
_QUESTION = Question(border=-LEAST_GAIN, doubt=0.01, seconds=20.0)


@dataclass(frozen=True)
class FormTrial:
    """One form of the model, timed whole: its name, kernels launched, median latency, and whether it was taken."""

    form: str
    launches: int
    model_ms: float
    taken: bool


@dataclass(frozen=True)
class NormFormsReport:
    """The forms, each timed whole."""

    trials: tuple[FormTrial, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data."""
        return {"trials": [asdict(trial) for trial in self.trials]}


def other_forms(prepared: PreparedModel) -> dict[str, PreparedModel]:
    """Return the model in the forms that differ from the one it was lowered to, by the form's name.

    None where the pass is switched off, where no norm can be taken into matmuls, and for models with buckets, whose
    modules share weights.
    """
    options = prepared.lowered.options
    if prepared.buckets or PASS in options.disabled_passes or prepared.target.kind != "cuda":
        return {}
    seen = {kernels_key(prepared)}
    found = {}
    for name, rows_max in FORMS.items():
        form = in_form(prepared, rows_max)
        if kernels_key(form) not in seen:
            seen.add(kernels_key(form))
            found[name] = form
    return found


def in_form(prepared: PreparedModel, rows_max: int) -> PreparedModel:
    """Return a model with norms taken into matmuls of so many rows at most."""
    if rows_max == prepared.lowered.options.norm_rows_max:
        return prepared
    options = replace(prepared.lowered.options, norm_rows_max=rows_max)
    lowered = lower(prepared.lowered.graph, prepared.target.target, options)
    tasks, untunable = list_tasks([lowered], prepared.sizes, prepared.target)
    return replace(prepared, lowered=lowered, tasks=tasks, untunable=untunable)


def with_common_tasks(forms: Sequence[PreparedModel]) -> list[PreparedModel]:
    """Return the forms with tasks that have one name in all of them, as tuning them together needs."""
    named = []
    for number, form in enumerate(forms):
        graph = replace(form.lowered.graph, name=f"{form.model.name} ({number})")
        named.append(replace(form.lowered, graph=graph))
    tasks, found = extract_tasks(named), []
    for form, lowered in zip(forms, named, strict=True):
        own = [task for task in form.tasks if task.tables]
        for task in tasks:
            functions = task.functions.get(lowered.graph.name)
            if functions is not None:
                weight = sum(len(form.lowered.kernels[function]) for function in functions)
                own.append(replace(task, functions={form.model.name: functions}, weight=weight))
        found.append(replace(form, tasks=tuple(own)))
    return found


def all_tasks(forms: Sequence[PreparedModel]) -> tuple[TuningTask, ...]:
    """Return the tasks of all forms, each once."""
    return tuple({task.workload_hash: task for form in reversed(forms) for task in form.tasks}.values())


def choose_form(
    forms: Mapping[str, tuple[PreparedModel, tuple[KernelChoice, ...]]],
    default: str,
    model: MeasuredModel,
    database: TuningDatabase,
    *,
    seed: int,
    job_id: str | None,
) -> tuple[str, NormFormsReport]:
    """Return the form whose whole model is the fastest, and what each takes; the database has it recorded.

    `forms`: form -> the model in it, with the choices of its kernels. `default`: the form that the model was lowered
    to: another must surely be faster than it.
    """
    prepared, choices = forms[default]
    launches = {name: sum(map(len, form.lowered.kernels.values())) for name, (form, _) in forms.items()}
    with temporary_folder() as folder:
        arms = {default: compiled_arm(prepared, choices, Path(folder) / "default")}
        for number, (name, (form, chosen)) in enumerate(forms.items()):
            if name != default:
                try:
                    arms[name] = compiled_arm(form, chosen, Path(folder) / str(number))
                except LoweringError as e:
                    if not is_of_the_machine(str(e)):
                        model.record(database, _decision(form), seed=seed, job_id=job_id, error=str(e))
                    logger.warning("%s: %s", name, e)
        found = run_experiment(lambda: arms, _QUESTION)
    faster = {name: one.gain for name, one in found.contrasts.items() if one.side is Side.BELOW}
    taken = max(faster, key=faster.__getitem__, default=default)
    latencies_ms = found.arms[taken].latencies_ms
    model.record(database, _decision(forms[taken][0]), seed=seed, job_id=job_id, latencies_ms=latencies_ms)
    trials = tuple(FormTrial(name, launches[name], arm.median_ms, name == taken) for name, arm in found.arms.items())
    for trial in trials:
        logger.info("%s: %d kernels, %.4f ms%s", trial.form, trial.launches, trial.model_ms, ", taken" * trial.taken)
    return taken, NormFormsReport(trials)


def _decision(prepared: PreparedModel) -> ModelDecision:
    return ModelDecision(prepared.lowered.options.norm_rows_max)


def default_form(prepared: PreparedModel) -> str:
    """Return what the form is called that a model was lowered to: a form's own name, or "by rows"."""
    rows_max = prepared.lowered.options.norm_rows_max
    return next((name for name, most in FORMS.items() if most == rows_max), f"norms in matmuls of {rows_max} rows")
