"""A model of a few layers has the tasks of the whole one, and their weights follow from two such models."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.gpu_arms.cases import Case
from benchmarks.gpu_arms.short_models import prepare_short, scale_weights
from benchmarks.whole_models import tune_gpu_cases
from benchmarks.whole_models.tune_gpu_cases import make_artifact, tune_case
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.tuning_db.records import RecordFilter
from relaxtune.tuning_db.store import TuningDatabase
from tests.unoptimised import UNOPTIMISED_TEXT

pytestmark = pytest.mark.slow

TARGET = "cuda:sm_90a"


@pytest.mark.parametrize(
    "case",
    [
        Case("bert-tiny-5-layers", 1, 64),
        Case("gpt2-tiny-5-layers", 1, 64),
        Case("llama-tiny-5-layers", 1, 64),
        Case("vit-tiny-5-layers", 2),
    ],
    ids=lambda case: case.model,
)
def test_tasks_and_weights_are_those_of_the_whole_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    base = case.model.removesuffix("-5-layers")
    monkeypatch.setattr(
        Case, "with_layers", lambda self, layers: Case(f"{base}-{layers}-layers", case.batch, case.length)
    )
    short = prepare_short(case, 2, TARGET)
    assert short is not None
    whole = prepare_model(ModelRequest(case.source, shapes=case.shapes, target=TARGET))
    assert {task.workload_hash: task.weight for task in short.tasks} == {
        task.workload_hash: task.weight for task in whole.tasks
    }
    order = [task.workload_hash for task in short.tasks]
    assert order[:2] == [task.workload_hash for task in whole.tasks][:2]


def test_a_decode_step_has_the_caches_of_its_layers() -> None:
    case = Case("llama-tiny-decode", 2, 8).with_layers(3)
    assert case.model == "llama-tiny-decode-3-layers"
    assert len([name for name in case.shapes if name.startswith("past_key_values")]) == 6
    assert case.shapes["attention_mask"] == (2, 8)


def test_a_model_that_is_no_longer_is_tuned_whole() -> None:
    assert prepare_short(Case("bert-tiny", 1, 16), 1, TARGET) is None
    assert prepare_short(Case("bert-tiny", 1, 16), 2, TARGET) is None


def test_a_task_that_ends_with_more_layers_is_left_out() -> None:
    short, longer = (
        prepare_model(ModelRequest("bert-tiny", target="llvm", shapes={"input_ids": (1, length)})).tasks
        for length in (8, 16)
    )
    both = scale_weights(short, longer, 1)
    assert {task.workload_hash for task in both} == {task.workload_hash for task in longer}


def test_the_whole_model_is_compiled_from_the_short_ones_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = TuningOptions(trials=1, routes=frozenset(), finals=0, workers=1, measure=MeasureOptions(repeats=1))
    monkeypatch.setattr(tune_gpu_cases, "_tuning", lambda arguments: few)
    arguments = argparse.Namespace(
        artifacts=tmp_path,
        db=None,
        seconds=0.0,
        seed=0,
        samples=1,
        target=UNOPTIMISED_TEXT,
        compile_only=False,
        tune_layers=1,
        tune_only=False,
        turn=None,
    )
    case = Case("bert-tiny-3-layers", 1, 16)
    summary = tune_case(case, arguments)
    assert all(task.after_us is not None for task in summary.tasks)
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        assert database.list_records(RecordFilter())
    made = make_artifact(case, arguments)
    assert made.without_record == ()
    assert made.validation is not None
    assert made.validation.passed
