"""Decisions about the graph of one model: what is lowered is real, what is measured is made up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

import relaxtune.pipeline.choose.graph_search as module
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.bench.measure import ArmResult
from relaxtune.pipeline.choose.graph_search import GraphReport, Verdict, recorded_trials, search_graph
from relaxtune.pipeline.choose.model_records import ModelDecision, measured_model, read_decision
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.experiment.experiment import Contrast, Experiment, Side
from relaxtune.pipeline.jobs.tuned_model import choose_kernels, select_as_measured
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.tuning_db.records import RecordFilter, Status
from relaxtune.tuning_db.store import TuningDatabase

APART, QKV = "norms apart", "Q, K and V apart"
FASTER = Contrast(-0.05, -0.06, -0.04, Side.BELOW)
SLOWER = Contrast(0.05, 0.04, 0.06, Side.ABOVE)
UNSURE = Contrast(-0.01, -0.03, 0.01, Side.UNSURE)


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    options = LoweringOptions(precision="fp16")
    return prepare_model(ModelRequest("bert-tiny", {"input_ids": (1, 16)}, "cuda:sm_90a", options))


@pytest.fixture
def database() -> Iterator[TuningDatabase]:
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Contrast]:
    """Have experiments find these contrasts, by decision, on a machine that has no GPU to run a model on."""
    found: dict[str, Contrast] = {}
    tried: list[str] = []

    def load_arm(_compiled: object, _calls: object, directory: object, *_beside: object) -> SimpleNamespace:
        tried.append(getattr(directory, "name", ""))
        return SimpleNamespace(arm=lambda: 1.0)

    def run_experiment(*_: object) -> Experiment:
        contrast = found.get(tried[-1], SLOWER)
        arms = {
            "so far": ArmResult("so far", (1.0, 1.0)),
            "tried": ArmResult("tried", (1.0 + contrast.difference,) * 2),
        }
        return Experiment({"tried": contrast}, arms, 2, 2, 1, 1, 1, 0.0)

    monkeypatch.setattr(module, "compile_module", lambda *_, **__: SimpleNamespace(seconds={}))
    monkeypatch.setattr(module, "load_arm", load_arm)
    monkeypatch.setattr(module, "run_experiment", run_experiment)
    return found


def choose(form: PreparedModel) -> tuple[KernelChoice, ...]:
    return choose_kernels(form, None)


def searched(
    prepared: PreparedModel, database: TuningDatabase, seconds: float = 1e6
) -> tuple[PreparedModel, GraphReport]:
    return search_graph(prepared, measured_model(prepared), database, choose, TuningOptions(graph_s=seconds))


def verdicts(report: GraphReport) -> Mapping[str, Verdict]:
    return {trial.decision: trial.verdict for trial in report.trials}


def calls(form: PreparedModel) -> int:
    return sum(map(len, form.lowered.kernels.values()))


def test_faster_decisions_are_kept_with_their_reasons_and_slower_ones_are_not(
    prepared: PreparedModel, database: TuningDatabase, measures: dict[str, Contrast]
) -> None:
    measures |= {APART: FASTER, QKV: UNSURE}
    form, report = searched(prepared, database)
    assert verdicts(report)[APART] is Verdict.KEPT
    assert verdicts(report)[QKV] is Verdict.UNSURE
    assert set(verdicts(report).values()) == {Verdict.KEPT, Verdict.UNSURE, Verdict.SLOWER}
    assert form.lowered.options.decided == {APART: "5.0% faster (at least 4.0%), kept"}
    assert calls(form) > calls(prepared)
    assert "norms in all matmuls" not in verdicts(report)


def test_a_model_is_compiled_with_the_recorded_decisions(
    prepared: PreparedModel, database: TuningDatabase, measures: dict[str, Contrast]
) -> None:
    measures[APART] = FASTER
    form, _ = searched(prepared, database)
    model = measured_model(prepared)
    model.record(database, ModelDecision(form.lowered.options.decided), seed=0, job_id=None, latencies_ms=(1.0,))
    again, _ = select_as_measured(prepared, database)
    assert again.lowered.options == form.lowered.options
    assert calls(again) == calls(form)
    assert {one.decision for one in recorded_trials(model, database)} >= {APART, QKV}


def test_a_decision_that_was_slower_is_not_measured_again(
    prepared: PreparedModel, database: TuningDatabase, measures: dict[str, Contrast]
) -> None:
    measures[QKV] = UNSURE
    searched(prepared, database)
    count = database.count_records()
    measures[APART] = FASTER
    _, report = searched(prepared, database)
    assert verdicts(report)[APART] is Verdict.SLOWER
    assert [trial.decision for trial in report.trials if trial.record_id is None] == [QKV]
    assert database.count_records() == count + 1


def test_no_decision_is_tried_without_time(
    prepared: PreparedModel, database: TuningDatabase, measures: dict[str, Contrast]
) -> None:
    _, report = searched(prepared, database, seconds=0.5)
    assert set(verdicts(report).values()) == {Verdict.NOT_TRIED}
    assert database.count_records() == 0
    assert searched(prepared, database, seconds=0.0) == (prepared, GraphReport())


@pytest.mark.parametrize(("message", "recorded"), [("no code for it", True), ("ld: memory exhausted", False)])
def test_a_decision_without_code_is_recorded_unless_the_machine_is_at_fault(
    prepared: PreparedModel,
    database: TuningDatabase,
    measures: dict[str, Contrast],
    monkeypatch: pytest.MonkeyPatch,
    message: str,
    recorded: bool,
) -> None:
    def compile_module(lowered: object, *_: object, **__: object) -> SimpleNamespace:
        if lowered is not prepared.lowered:
            raise LoweringError(message)
        return SimpleNamespace(seconds={})

    monkeypatch.setattr(module, "compile_module", compile_module)
    form, report = searched(prepared, database)
    assert form is prepared
    assert set(verdicts(report).values()) == {Verdict.NO_CODE}
    failed = database.list_records(RecordFilter(status=Status.BUILD_ERROR))
    assert {one.error for one in failed} == ({message} if recorded else set())


def test_a_record_of_an_earlier_version_keeps_norms_apart(prepared: PreparedModel, database: TuningDatabase) -> None:
    model = measured_model(prepared)
    model.record(database, {"norm_rows_max": 0, "kernels": {}}, seed=0, job_id=None, latencies_ms=(1.0,))
    (record,) = database.list_records()
    assert list(read_decision(record).graph) == [APART]
    plain = replace(record, decision='{"norm_rows_max": 2048, "kernels": {}}')
    assert read_decision(plain).graph == {}
