"""An artifact that fails validation is not left, nor recorded, where a good one is expected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.manifest import SIGNATURE_FILE
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs import compile_and_tune as jobs
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase
from tests import warm_python
from tests.unoptimised import UNOPTIMISED_TEXT

SHAPES = {"pixel_values": (1, 3, 32, 32)}
REQUEST = ModelRequest("vit-tiny", SHAPES, UNOPTIMISED_TEXT)


def test_a_failed_artifact_lies_aside_and_the_good_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rejected = tmp_path / "artifact", tmp_path / "artifact.rejected"
    TuningDatabase.open(tmp_path / "tuning.db").close()
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
    with TuningDatabase.open(tmp_path / "tuning.db", mode=Mode.READ_ONLY) as database:
        assert [artifact.location for artifact in database.list_artifacts()] == [str(rejected)]
        assert [validation.passed for validation in database.list_validations()] == [False]
    monkeypatch.undo()
    assert jobs.compile_model(REQUEST, out, samples=1).directory == out
    assert not rejected.exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("tuning.db")] == ["artifact"]


# Waits with its validation for that of the other process; vit-tiny is compared with other weights than its own.
RACE = """
import sys, time
from pathlib import Path
from relaxtune.models import load_model
from relaxtune.pipeline.jobs import compile_and_tune as jobs
from relaxtune.pipeline.prepare import ModelRequest
from tests.unoptimised import UNOPTIMISED_TEXT

name, axis, sizes, flags, out, key = sys.argv[1:]
shapes = {axis: tuple(map(int, sizes.split("x")))}
validate = jobs.validate_written

def together(module, place, model, *rest):
    Path(flags, name).touch()
    while len(list(Path(flags).iterdir())) < 2:
        time.sleep(0.01)
    return validate(module, place, load_model(name, shapes=shapes, seed=int(name == "vit-tiny")), *rest)

jobs.validate_written = together
made = jobs.compile_model(ModelRequest(name, shapes, UNOPTIMISED_TEXT), Path(out), samples=1, sign=Path(key))
print(made.manifest.model, made.validation.passed, made.directory)
"""


@pytest.mark.slow
def test_two_processes_with_one_place_keep_their_own_artifacts(tmp_path: Path) -> None:
    out, rejected, flags, key = (tmp_path / name for name in ("artifact", "artifact.rejected", "flags", "key.pem"))
    flags.mkdir()
    private = Ed25519PrivateKey.generate()
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    models = [("vit-tiny", "pixel_values", "1x3x32x32"), ("bert-tiny", "input_ids", "1x8")]
    writers = [
        warm_python.Popen(
            [sys.executable, "-c", RACE, *model, str(flags), str(out), str(key)], stdout=subprocess.PIPE, text=True
        )
        for model in models
    ]
    told = [writer.communicate()[0].split() for writer in writers]
    assert told == [["vit-tiny", "False", str(rejected)], ["bert-tiny", "True", str(out)]]
    found = [load_manifest(place) for place in (rejected, out)]
    assert [(one.model, one.validation["passed"]) for one in found] == [("vit-tiny", False), ("bert-tiny", True)]
    assert [(place / SIGNATURE_FILE).exists() for place in (rejected, out)] == [False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "artifact.rejected", "flags", "key.pem"]


@pytest.mark.quick_cases("OSError")
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
