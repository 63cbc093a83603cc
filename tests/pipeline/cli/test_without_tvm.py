"""The words that compile and run nothing answer without TVM, whose import takes two seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relaxtune.tuning_db.batches import finish_batch, start_batch
from relaxtune.tuning_db.cell_states import CellSpec
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.store import TuningDatabase
from tests.command_line import Ended, all_words

# They lower, compile, run or measure, or ask for a target's attributes, which TVM knows.
NEED_TVM = {
    "tune", "compile", "validate", "compare", "bench", "run", "generate", "embed", "calibrate", "gate", "inspect",
    "doctor", "artifact promote", "artifact rebuild", "artifact refit", "artifact export-ep", "batch plan", "batch run",
    "batch resume", "cluster check", "db explain",
}  # fmt: skip
# It says what each command ended with, and whether TVM was there then.
_PROGRAM = """
import contextlib, io, json, sys
from relaxtune.pipeline.cli.app import main
for words in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([words, code, "tvm" in sys.modules, out.getvalue()]))
"""


def filled(path: Path) -> str:
    """Make a database with a record, a job, and two batches of one cell, of which one is over; return the job."""
    target, environment = (
        TargetKey("llvm", "znver4"), Environment("cpu", "EPYC", "znver4", None, None, "0.27", "0.1", 2)
    )  # fmt: skip
    workload = Workload("h1", "matmul", '{"family":"matmul"}', "dense", 1e6, 1e3, None, "0.27")
    with TuningDatabase.open(path) as database:
        database.record_workload(workload)
        job = database.start_job(model="bert", model_sha256="0" * 64, target=target)
        database.record_job_tasks(job.id, [JobTask("h1", "0.27", 12, ("n",), 1.0)])
        record = TuningRecord(
            "h1", workload.signature_key, target, environment, Route.METASCHEDULE, "[]", Status.OK, (20.0,),
            job_id=job.id,
        )  # fmt: skip
        database.record_measurements([record])
        database.finish_job(job.id, "done")
        cell = CellSpec("bert", "bert.onnx", "", "", "fp16", "quick", "llvm", 3, "", "k" * 64)
        for name in ("night", "over"):
            batch = start_batch(database, key=name, name=name, path="a.toml", plan="[[cells]]", cells=[cell])
        finish_batch(database, batch.id, "done")
    return job.id


@pytest.mark.slow
def test_words_that_run_nothing_do_without_tvm(artifact: Path, relaxtune: Callable[..., Ended], tmp_path: Path) -> None:
    db = ["--db", tmp_path / "tuning.db"]
    job, store = filled(tmp_path / "tuning.db"), ["--store", tmp_path / "store"]
    for _ in range(2):
        assert relaxtune("artifact", "tag", "prod", "--to", artifact, *store, *db).code == 0
    archive, other = tmp_path / "records.jsonl", ["--db", tmp_path / "other.db"]
    commands: dict[str, tuple[object, ...]] = {
        "artifact list": (*store, *db),
        "artifact show": ("prod", *store, *db),
        "artifact fetch": ("prod", "--out", tmp_path / "fetched", *store),
        "artifact rollback": ("prod", *store, *db),
        "artifact tag": ("prod", "--remove", *store, *db),
        "artifact gc": ("--older-than", 0, *store, *db),
        "report": (artifact, "--no-profile", "--out", tmp_path / "a.html"),
        "dashboard": ("--port", 0, "--db", tmp_path / "none.db"),
        "batch status": ("night", *db),
        "batch cancel": ("bert", "night", *db),
        "batch watch": ("over", *db),
        "batch report": ("over", "--out", tmp_path / "b.html", *db),
        "db batches": db,
        "db artifacts": db,
        "db export": (archive, *db),
        "db bundle": (artifact, "--out", tmp_path / "bundle.db", *db),
        "db import": (archive, *other),
        "db merge": (tmp_path / "tuning.db", *other),
        "db prune": ("--dominated", *other),
        "db delete": (1, *other),
        "db history": db,
        "db failures": db,
        "db coverage": ("bert", *db),
        "db jobs": db,
        "db cost": (job, *db),
        "db regressions": ("--old-tvm", "0.27", "--new-tvm", "0.28", *db),
        "db top": db,
        "db query": db,
        "db workloads": db,
        "db init": ("--db", tmp_path / "new.db"),
        "db info": db,
        "db upgrade": db,
    }
    assert sorted([*commands, *NEED_TVM]) == sorted(all_words()), "a new word belongs to those or to these"
    told = [[*word.split(), *map(str, options)] for word, options in commands.items()]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], input=json.dumps(told), capture_output=True, text=True, check=False
    )
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, *_ in ended] == told, done.stderr
    # There is no such database: a server would not end.
    assert [(words, out) for words, code, _, out in ended if code != (words[0] == "dashboard")] == []
    assert [words for words, _, tvm, _ in ended if tvm][:1] == []
