"""Norms inside matmuls and apart, in one model: what is lowered and compiled is real, what is measured is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import relaxtune.pipeline.choose.norm_forms as module
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.model_records import measured_model
from relaxtune.pipeline.choose.norm_forms import (
    all_tasks,
    choose_form,
    default_form,
    in_form,
    other_forms,
    with_common_tasks,
)
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.tuning_db.records import RecordFilter, Status
from relaxtune.tuning_db.store import TuningDatabase

APART, FUSED = "norms apart", "norms in matmuls"
FP16 = LoweringOptions(precision="fp16")


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare_model(ModelRequest("bert-tiny", target="cuda:sm_90a", shapes={"input_ids": (1, 16)}, lowering=FP16))


def kernels(form: PreparedModel) -> int:
    return sum(map(len, form.lowered.kernels.values()))


def test_a_model_has_the_forms_that_differ_from_its_own(prepared: PreparedModel) -> None:
    others = other_forms(prepared)
    assert list(others) == [APART]
    assert kernels(others[APART]) > kernels(prepared)
    back = other_forms(others[APART])
    assert list(back) == [FUSED]
    assert kernels(back[FUSED]) == kernels(prepared)
    assert [default_form(one) for one in (others[APART], back[FUSED])] == [APART, FUSED]


@pytest.mark.parametrize(
    "request_",
    [
        ModelRequest("bert-tiny", target="llvm", lowering=FP16),
        ModelRequest("bert-tiny", target="cuda:sm_75", lowering=FP16),
        ModelRequest("bert-tiny", target="cuda:sm_90a", lowering=LoweringOptions("fp16", frozenset({"fuse_norms"}))),
    ],
    ids=["a CPU", "no template", "switched off"],
)
def test_a_model_whose_norms_stay_apart_has_one_form(request_: ModelRequest) -> None:
    assert other_forms(prepare_model(request_)) == {}


def test_tasks_of_all_forms_are_tuned_once_and_have_one_name(prepared: PreparedModel) -> None:
    own, apart = with_common_tasks([prepared, other_forms(prepared)[APART]])
    assert {task.workload_hash: task.weight for task in own.tasks} == {
        task.workload_hash: task.weight for task in prepared.tasks
    }
    tasks = all_tasks([own, apart])
    names = {task.name: task.workload_hash for task in tasks}
    assert len(names) == len(tasks) == len({task.workload_hash for task in (*own.tasks, *apart.tasks)})
    for form in (own, apart):
        assert all(names[task.name] == task.workload_hash for task in form.tasks)
        assert {name for task in form.tasks for name in task.functions[form.model.name]} <= set(form.lowered.kernels)
    shared = {task.workload_hash for task in own.tasks} & {task.workload_hash for task in apart.tasks}
    assert shared
    assert shared < {task.workload_hash for task in own.tasks}


Selected = dict[str, tuple[PreparedModel, tuple[KernelChoice, ...]]]


@pytest.fixture(scope="module")
def selected(prepared: PreparedModel) -> Selected:
    forms = dict(zip((FUSED, APART), with_common_tasks([prepared, other_forms(prepared)[APART]]), strict=True))
    return {
        name: (
            form,
            select_kernels(form.lowered, form.tasks, database=None, target=form.target, environment=form.environment),
        )
        for name, form in forms.items()
    }


def told(monkeypatch: pytest.MonkeyPatch, own: float, apart: float) -> None:
    """Have the arms say that they took so many milliseconds, on a machine that has no GPU to run them on."""
    latencies = iter((own, apart))

    def arm(*_: object) -> Callable[[], float]:
        ms = next(latencies)
        return lambda: ms

    monkeypatch.setattr(module, "compiled_arm", arm)


@pytest.mark.parametrize(
    ("own", "apart", "taken"),
    [(1.0, 0.9, APART), (1.0, 0.998, FUSED), (1.0, 1.1, FUSED)],
    ids=["faster", "hardly", "slower"],
)
def test_the_form_that_was_fastest_is_recorded_and_compiled_from_the_record(
    prepared: PreparedModel,
    selected: Selected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: float,
    apart: float,
    taken: str,
) -> None:
    told(monkeypatch, own, apart)
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        model = measured_model(prepared)
        assert model.find(database) is None
        name, report = choose_form(selected, FUSED, model, database, seed=0, job_id=None)
        assert name == taken
        assert {trial.form: trial.taken for trial in report.trials} == {FUSED: taken == FUSED, APART: taken == APART}
        assert {trial.form: trial.launches for trial in report.trials} == {
            name: kernels(form) for name, (form, _) in selected.items()
        }
        (record,) = database.list_records()
        rows_max = selected[taken][0].lowered.options.norm_rows_max
        assert json.loads(record.decision)["norm_rows_max"] == rows_max
        assert record.latency_us == pytest.approx(1e3 * (apart if taken == APART else own))
        assert database.get_workload(record.workload_hash).family == "model"
        found = model.find(database)
        assert found is not None
        assert kernels(in_form(prepared, found.norm_rows_max)) == kernels(selected[taken][0])
        told(monkeypatch, 2.0, 3.0)
        choose_form(selected, FUSED, model, database, seed=0, job_id=None)
        newest = model.find(database)
        assert newest is not None
        assert newest.norm_rows_max == prepared.lowered.options.norm_rows_max


@pytest.mark.parametrize(("told_by_compiler", "recorded"), [("no code for it", True), ("ld: memory exhausted", False)])
def test_a_form_that_does_not_compile_is_left_and_recorded_unless_the_machine_is_at_fault(
    selected: Selected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by_compiler: str, recorded: bool
) -> None:
    def arm(prepared: PreparedModel, _choices: object, _directory: Path) -> Callable[[], float]:
        if prepared is selected[APART][0]:
            raise LoweringError(told_by_compiler)
        return lambda: 1.0

    monkeypatch.setattr(module, "compiled_arm", arm)
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        model = measured_model(selected[FUSED][0])
        name, report = choose_form(selected, FUSED, model, database, seed=0, job_id=None)
        assert (name, [trial.form for trial in report.trials]) == (FUSED, [FUSED])
        failed = database.list_records(RecordFilter(status=Status.BUILD_ERROR))
        assert [one.error for one in failed] == [told_by_compiler] * recorded
