"""An artifact that fails validation is not left, nor recorded, where a good one is expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline import jobs
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import SqlDatabase
from tests.unoptimised import UNOPTIMISED_TEXT

SHAPES = {"pixel_values": (1, 3, 32, 32)}
REQUEST = ModelRequest("vit-tiny", SHAPES, UNOPTIMISED_TEXT)


def test_a_failed_artifact_lies_aside_and_the_good_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rejected = tmp_path / "artifact", tmp_path / "artifact.rejected"
    SqlDatabase.open(tmp_path / "tuning.db").close()
    good = jobs.compile_model(REQUEST, out, samples=1)
    assert (good.directory, rejected.exists()) == (out, False)
    validate = jobs.validate_written

    def against_other_weights(module: Module, place: Path, _: OnnxModel, *rest: object) -> ValidationReport:
        return validate(module, place, load_model("vit-tiny", shapes=SHAPES, seed=1), *rest)

    monkeypatch.setattr(jobs, "validate_written", against_other_weights)
    failed = jobs.compile_model(REQUEST, out, samples=1, database=tmp_path / "tuning.db", record=True)
    assert failed.validation is not None
    assert not failed.validation.passed
    assert failed.directory == rejected
    assert [load_manifest(place).validation["passed"] for place in (out, rejected)] == [True, False]
    with SqlDatabase.open(tmp_path / "tuning.db", mode=Mode.READ_ONLY) as database:
        assert [artifact.location for artifact in database.list_artifacts()] == [str(rejected)]
        assert [validation.passed for validation in database.list_validations()] == [False]
    monkeypatch.undo()
    assert jobs.compile_model(REQUEST, out, samples=1).directory == out
    assert not rejected.exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("tuning.db")] == ["artifact"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_artifact_that_was_not_judged_is_not_left_as_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def broken(*_: object) -> ValidationReport:
        raise error

    monkeypatch.setattr(jobs, "validate_written", broken)
    with pytest.raises(error):
        jobs.compile_model(REQUEST, tmp_path / "artifact", samples=1)
    assert list(tmp_path.iterdir()) == []
