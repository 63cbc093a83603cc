"""`relaxtune db`: the commands that ask over time, and those that move databases between people."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.cli.db.common import FilterOptions
from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.store import TuningDatabase

START = datetime(2026, 1, 1, tzinfo=UTC)
TARGET = TargetKey("llvm", "znver4")
SIGNATURE = '{"family":"matmul","inputs":[[[1,128,768],"float16"]]}'


def make_record(workload, *, us=None, days=0, tvm="0.27", job=None, error=None, route=Route.METASCHEDULE):
    return TuningRecord(
        workload_hash=workload.workload_hash,
        signature_key=workload.signature_key,
        target=TARGET,
        environment=Environment("cpu", "EPYC", "znver4", None, None, tvm, "0.1", 2),
        route=route,
        decision="[]",
        status=Status.OK if us else Status.BUILD_ERROR,
        latencies_us=(us,) if us else (),
        error=error,
        duration_s=0.5,
        job_id=job,
        created_at=START + timedelta(days=days),
    )


@pytest.fixture
def filled(tmp_path):
    path = tmp_path / "tuning.db"
    old = Workload("h1", "matmul", SIGNATURE, "dense", 1e6, 1e3, None, "0.27")
    new = Workload("h2", "matmul", SIGNATURE, "dense", 1e6, 1e3, None, "0.28")
    with TuningDatabase.open(path) as database:
        database.record_workload(old)
        database.record_workload(new)
        job = database.start_job(model="bert", model_sha256="0" * 64, target=TARGET)
        database.record_job_tasks(job.id, [JobTask("h1", "0.27", 12, ("n",), 1.0)])
        database.record_measurements(
            [
                make_record(old, us=20.0, job=job.id),
                make_record(old, us=10.0, days=1, job=job.id),
                make_record(old, days=1, error="no room: 7 KiB", job=job.id),
                make_record(new, us=15.0, days=2, tvm="0.28"),
            ]
        )
        database.finish_job(job.id, "done")
    return path, job.id


@pytest.fixture
def call(capsys):
    def run(*arguments, code=0):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert (exit_.value.code or 0) == code, captured.err
        return captured

    return run


@pytest.fixture
def rows(call, filled):
    def run(*arguments):
        return json.loads(call("db", *arguments, "--db", filled[0], "--format", "json").out)

    return run


QUESTIONS = [
    ("info",),
    ("top",),
    ("query",),
    ("workloads",),
    ("history", "--workload", "h1"),
    ("failures",),
    ("coverage", "bert"),
    ("jobs",),
    ("artifacts",),
    ("regressions", "--old-tvm", "0.27", "--new-tvm", "0.28", "--threshold", "0"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[0])
def test_question_is_answered_as_table_json_and_csv(call, filled, question):
    database = ("--db", filled[0])
    value = json.loads(call("db", *question, *database, "--format", "json").out)
    lines = list(csv.reader(io.StringIO(call("db", *question, *database, "--format", "csv").out)))
    items = value if isinstance(value, list) else [value]
    assert len(lines) == len(items) + 1
    assert {len(line) for line in lines} == {len(lines[0])}
    assert "┃" in call("db", *question, *database).out


def test_history_shows_each_day(rows):
    points = rows("history", "--workload", "h1")
    assert [(p["day"], p["best_us"], p["candidates"]) for p in points] == [
        ("2026-01-01", 20.0, 1),
        ("2026-01-02", 10.0, 2),
    ]
    assert len(rows("history", "--since", "2026-01-02")) == 2


def test_failures_show_the_cause(rows):
    (cause,) = rows("failures")
    assert (cause["cause"], cause["count"], cause["status"]) == ("no room: # KiB", 1, "build_error")
    assert rows("failures", "--route", "library") == []


def test_coverage_names_the_models_known_when_asked_for_another(rows, call, filled):
    (task,) = rows("coverage", "bert")
    assert (task["covered"], task["device_name"], task["valid"], task["weight"]) == (True, "EPYC", 2, 12)
    error = call("db", "coverage", "gpt2", "--db", filled[0], code=2).err
    assert "No job of this database tuned 'gpt2'; it knows bert" in error


def test_cost_of_a_job(rows, call, filled):
    cost = rows("cost", filled[1])
    assert (cost["candidates"], cost["candidate_s"], cost["by_status"]["build_error"]) == (3, 1.5, 1)
    assert "device seconds" in call("db", "cost", filled[1], "--db", filled[0]).out
    assert rows("cost", filled[1][:8])["job"]["id"] == filled[1]
    assert "No job nix" in call("db", "cost", "nix", "--db", filled[0], code=2).err
    with TuningDatabase.open(filled[0]) as database:
        other = database.start_job(model="bert", model_sha256="0" * 64, target=TARGET).id
    error = call("db", "cost", "", "--db", filled[0], code=2).err
    assert "2 begin with it: " in error
    assert other in error


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("family", "matmull", "matmul"),
        ("model", "brt", "bert"),
        ("device", "H200", "EPYC"),
        ("arch", "sm_90a", "znver4"),
        ("target", "cuda", "llvm"),
        ("tvm", "0.29", "0.27, 0.28"),
        ("workload", "h3", "h1, h2"),
    ],
)
def test_misspelt_name_is_an_error_that_says_what_is_known(call, filled, option, value, known):
    for command in ("top", "query", "workloads", "failures"):
        error = call("db", command, f"--{option}", value, "--db", filled[0], code=2).err
        assert f"--{option} '{value}': this database has none of that {option}; it has {known}" in error
    assert "No job nix" in call("db", "query", "--job", "nix", "--db", filled[0], code=2).err
    for command in ("jobs", "artifacts"):
        assert "it has bert" in call("db", command, "--model", "brt", "--db", filled[0], code=2).err


def test_json_has_no_json_inside(rows):
    record = rows("top")[0]["best"]
    assert record["target"]["attributes"] == {}
    assert rows("workloads")[0]["signature"] == json.loads(SIGNATURE)


def test_regressions_between_versions_and_dates(rows, call, filled):
    (found,) = rows("regressions", "--old-tvm", "0.27", "--new-tvm", "0.28", "--threshold", "0")
    assert (found["before_us"], found["after_us"], found["ratio"], found["least"]) == (10.0, 15.0, 1.5, None)
    # One latency on each side proves nothing, and another TVM is not compared between dates.
    assert rows("regressions", "--old-tvm", "0.27", "--new-tvm", "0.28") == []
    assert rows("regressions", "--split-at", "2026-01-03", "--threshold", "0") == []
    assert (
        "is no probability"
        in call("db", "regressions", "--split-at", "2026-01-03", "--alpha", "2", "--db", filled[0], code=2).err
    )
    for wrong in ((), ("--old-tvm", "1"), ("--split-at", "2026-01-03", "--old-tvm", "1", "--new-tvm", "2")):
        assert "needs --split-at" in call("db", "regressions", *wrong, "--db", filled[0], code=2).err


def test_filters_by_shape_dtype_and_device(rows, call, filled):
    assert len(rows("query", "--shape", "1x128x768", "--dtype", "float16", "--device", "EPYC")) == 4
    assert rows("query", "--shape", "1x128") == []
    assert rows("top", "--dtype", "int8") == []
    assert len(rows("workloads", "--shape", "1x128x768")) == 2
    assert "expected sizes such as" in call("db", "top", "--shape", "1,2", "--db", filled[0], code=2).err


def test_every_filter_is_an_option_of_every_command_that_selects_records(call):
    """The filters are written once; a command leaves out those that mean nothing to it."""
    left_out = {"top": {"status"}, "coverage": {"model"}, "regressions": {"tvm", "status", "since", "until"}}
    for command in ("top", "query", "workloads", "history", "failures", "coverage", "regressions", "export", "prune"):
        described = call("db", command, "--help").out
        for name in (field.name for field in dataclasses.fields(FilterOptions)):
            assert (f" --{name} " in described) is (name not in left_out.get(command, ())), (command, name)


def test_filters_combine_in_every_command(rows):
    assert len(rows("workloads", "--tvm", "0.28")) == 1
    assert rows("workloads", "--tvm", "0.28", "--status", "build_error") == []
    assert len(rows("query", "--tvm", "0.27", "--arch", "znver4", "--target", "llvm", "--since", "2026-01-02")) == 2
    assert rows("failures", "--shape", "1x128x768", "--until", "2026-01-02") == []
    assert rows("coverage", "bert", "--status", "build_error")[0]["valid"] == 0


def test_resources_are_shown_where_they_are_known(call, filled):
    assert "registers" not in call("db", "query", "--db", filled[0]).out
    workload = Workload("h1", "matmul", SIGNATURE, "dense", 1e6, 1e3, None, "0.27")
    with TuningDatabase.open(filled[0]) as database:
        database.record_measurement(replace(make_record(workload, us=1.0), registers=168, spill_bytes=4))
    shown = call("db", "query", "--db", filled[0]).out
    assert "registers" in shown
    assert "168" in shown
    assert "spill B" in shown
    assert "smem B" not in shown
    top = json.loads(call("db", "top", "--workload", "h1", "--db", filled[0], "--format", "json").out)
    assert (top[0]["best"]["registers"], top[0]["best"]["smem_bytes"], top[0]["best"]["spill_bytes"]) == (168, None, 4)


def test_artifacts_show_their_last_validation_and_the_last_run_of_each_arm(rows, call, filled):
    path, job = filled
    environment = Environment("cpu", "EPYC", "znver4", None, None, "0.27", "0.1", 2)
    with TuningDatabase.open(path) as database:
        first = Artifact("bert", "0" * 64, TARGET, '{"kernels":[1]}', "out/bert", job, START)
        second = Artifact("gpt2", "1" * 64, TARGET, '{"kernels":[2]}', "out/gpt2", None, START + timedelta(days=1))
        for artifact in (first, second):
            database.record_artifact(artifact)
        for day, passed, error in ((1, True, 1e-6), (2, False, math.inf)):
            moment = START + timedelta(days=day)
            database.record_validation(Validation(first.key, environment, passed, 3, error, "{}", moment))
            # The untuned arm ran on the first day only, so it does not stand beside those of the second.
            for arm in ("relaxtune", "ort", *(["untuned"] if day == 1 else [])):
                latencies = (1000.0 * day, 1000.0 * day, 9000.0)
                database.record_benchmark(Benchmark(first.key, environment, arm, latencies, "{}", moment))
    newest, oldest = rows("artifacts")
    assert (newest["model"], newest["validation"], newest["benchmarks"], newest["validations"]) == ("gpt2", None, [], 0)
    assert (oldest["job_id"], oldest["validations"], oldest["location"]) == (job, 2, "out/bert")
    assert (oldest["validation"]["passed"], oldest["validation"]["max_abs"]) == (False, None)
    assert [(arm["arm"], arm["latency_us"]) for arm in oldest["benchmarks"]] == [("relaxtune", 2000.0), ("ort", 2000.0)]
    table = call("db", "artifacts", "--db", path).out
    for text in ("FAILED, max abs not finite", "never", "relaxtune 2.000, ort 2.000"):
        assert text in table
    assert [one["model"] for one in rows("artifacts", "--model", "gpt2")] == ["gpt2"]
    assert [one["model"] for one in rows("artifacts", "--job", job)] == ["bert"]
    info = rows("info")
    assert (info["artifacts"], info["validations"], info["benchmarks"]) == (2, 2, 5)


def test_archive_is_exported_imported_and_merged(call, filled, tmp_path):
    archive, other = tmp_path / "a.rtdb", tmp_path / "other.db"
    wrote = json.loads(call("db", "export", archive, "--db", filled[0], "--format", "json").out)
    assert wrote["bytes"] == archive.stat().st_size
    for new in (4, 0):
        read = json.loads(call("db", "import", archive, "--db", other, "--format", "json").out)
        assert (read["records"], read["new_records"], read["jobs"]) == (4, new, 1)
    merged = json.loads(call("db", "merge", filled[0], "--db", tmp_path / "third.db", "--format", "json").out)
    assert merged["new_records"] == 4
    assert "new records" in call("db", "merge", other, "--db", tmp_path / "third.db").out
    archive.write_bytes(archive.read_bytes()[:-20])
    assert "line" in call("db", "import", archive, "--db", tmp_path / "fourth.db", code=1).err


@pytest.mark.parametrize("name", ["e.parquet", "e.CSV", "e.db"])
def test_an_archive_is_not_named_as_what_other_programs_read(call, filled, tmp_path, name):
    told = call("db", "export", tmp_path / name, "--db", filled[0], code=2).err
    assert "would not be what its name says" in told
    assert "Name it e.rtdb" in told
    assert not (tmp_path / name).exists()


def test_filtered_export_holds_what_was_asked_for(call, filled, tmp_path):
    call("db", "export", tmp_path / "a", "--db", filled[0], "--status", "build_error")
    read = json.loads(call("db", "import", tmp_path / "a", "--db", tmp_path / "o.db", "--format", "json").out)
    assert read["records"] == 1


def test_prune_refuses_more_days_than_there_are(call, filled):
    assert "older-than-days" in call("db", "prune", "--older-than-days", 1e9, "--db", filled[0], code=2).err


def test_prune_says_what_would_go_and_removes_it(call, filled):
    def prune(*arguments):
        return json.loads(call("db", "prune", *arguments, "--db", filled[0], "--format", "json").out)

    assert prune("--dominated", "--dry-run") == {"removed": 1, "left": 4}
    assert prune("--dominated") == {"removed": 1, "left": 3}
    assert prune("--older-than-days", "1") == {"removed": 1, "left": 2}
    assert prune("--keep", "1") == {"removed": 0, "left": 2}
    assert "Nothing says what to prune" in call("db", "prune", "--db", filled[0], code=1).err


def test_metaschedule_files_go_out_and_come_back(call, tmp_path):
    from tests.tuning_db.exchange.test_stock_json import RECORD_FILE, WORKLOAD_FILE, matmul, open_stock, tvm

    stock = tmp_path / "stock"
    stock.mkdir()
    database = open_stock(stock)
    from tvm.s_tir import meta_schedule as ms

    workload = database.commit_workload(matmul(8))
    trace = tvm.s_tir.Schedule(matmul(8)).trace
    database.commit_tuning_record(ms.database.TuningRecord(trace, workload, [1e-6], tvm.target.Target("llvm")))
    ours = tmp_path / "ours.db"
    options = ("--measured-for", "llvm", "--measured-on", "that machine", "--format", "json")
    read = json.loads(call("db", "import", stock, "--db", ours, *options).out)
    assert (read["records"], read["new_records"]) == (1, 1)
    (line,) = json.loads(call("db", "query", "--db", ours, "--format", "json").out)
    assert line["record"]["environment"]["device_name"] == "that machine"
    call("db", "export", tmp_path / "out", "--as", "metaschedule", "--db", ours)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {WORKLOAD_FILE, RECORD_FILE}
    assert len(open_stock(tmp_path / "out")) == 1


def test_every_command_of_the_page_is_understood(call):
    """The outputs on the page are examples; the commands must exist with these options."""
    text = (Path(__file__).parents[4] / "docs" / "database.md").read_text()
    commands = [line.split(" | ")[0] for line in re.findall(r"^(?:\$ )?(relaxtune db .*)", text, re.MULTILINE)]
    assert len(commands) >= 10
    assert len(re.findall(r"^### \d+\. ", text, re.MULTILINE)) == 10
    for command in commands:
        _, db, name, *arguments = shlex.split(command)
        described = call(db, name, "--help").out
        for option in (argument for argument in arguments if argument.startswith("--")):
            assert option in described, command


def test_delete_forgets_records_by_id_or_says_which_is_missing(call, filled):
    def ids():
        lines = json.loads(call("db", "query", "--db", filled[0], "--format", "json").out)
        return {line["record"]["id"] for line in lines}

    before = ids()
    one, *_ = sorted(before)
    assert "There is no record 999 " in call("db", "delete", str(one), "999", "--db", filled[0], code=1).err
    assert ids() == before
    told = json.loads(call("db", "delete", str(one), "--db", filled[0], "--format", "json").out)
    assert told == {"removed": 1, "left": len(before) - 1}
    assert ids() == before - {one}
