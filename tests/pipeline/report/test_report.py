"""Reports of real artifacts and databases: times, shares, rates, and what is said to be missing."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import make_url

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.report.kernel import TimeSource
from relaxtune.pipeline.report.page import render_page
from relaxtune.pipeline.report.profile import Profile, profile_artifact
from relaxtune.pipeline.report.report import Report, report_artifact, report_database
from relaxtune.tuning_db.records import Route, Workload, utc_now
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.report.conftest import CEILINGS


def test_times_shares_and_rates_come_from_the_records(tuned: Path) -> None:
    report = report_artifact(tuned, ceilings=CEILINGS)
    manifest = load_manifest(tuned)
    assert len(report.kernels) == len(manifest.kernels)
    assert sum(row.share or 0.0 for row in report.kernels) == pytest.approx(1.0)
    assert report.kernels_us == pytest.approx(sum((k.latency_us or 0.0) * k.calls for k in manifest.kernels))
    totals = [row.total_us or 0.0 for row in report.kernels]
    assert totals == sorted(totals, reverse=True)
    matmul = next(row for row in report.kernels if row.family == "matmul")
    assert matmul.time_source is TimeSource.RECORD
    assert matmul.flops is not None
    assert matmul.time_us is not None
    assert matmul.flops_per_s == pytest.approx(matmul.flops / (matmul.time_us * 1e-6))
    assert matmul.compute_use == pytest.approx((matmul.flops_per_s or 0.0) / 1e12)
    assert matmul.onnx_nodes
    assert report.notes == ()


def test_arithmetic_outside_the_matmul_units_has_no_ceiling(tuned: Path) -> None:
    report = report_artifact(tuned, ceilings=CEILINGS)
    norm = next(row for row in report.kernels if row.family == "norm")
    assert norm.flops_per_s
    assert norm.compute_use is None
    assert norm.bandwidth_use


def test_resources_and_device_are_the_records(tuned: Path, database: TuningDatabase) -> None:
    report = report_artifact(tuned)
    assert all(row.registers and row.registers >= 40 for row in report.kernels)
    assert {row.smem_bytes for row in report.kernels} == {1024}
    assert report.device == database.get_record(1).environment.device_name
    with_database = report_artifact(tuned, database=database)
    assert with_database.kernels == report.kernels
    assert with_database.notes == report.notes


def test_records_of_another_database_are_not_believed(tuned: Path, tmp_path: Path) -> None:
    with TuningDatabase.open(tmp_path / "other.db") as empty:
        report = report_artifact(tuned, database=empty)
    assert any("lacks the records of" in note and "compiled from another database?" in note for note in report.notes)
    assert all(row.time_us for row in report.kernels)


def test_an_untuned_artifact_says_that_it_has_no_times(artifact: Path) -> None:
    report = report_artifact(artifact)
    assert report.kernels_us == 0.0
    assert any("have no time and no share" in note and "and 15 more" in note for note in report.notes)
    assert any("no bottlenecks: the ceilings of" in note for note in report.notes)
    page = render_page([report])
    assert "No kernel has a time" in page
    assert "not measured" in page


def test_a_profile_times_every_kernel_and_the_module(artifact: Path) -> None:
    profile = profile_artifact(artifact)
    kernels = load_manifest(artifact).kernels
    assert set(profile.kernels_us) == {kernel.function for kernel in kernels}
    assert all(value > 0 for value in profile.kernels_us.values())
    assert profile.model_us is not None
    assert profile.model_us > 0
    report = report_artifact(artifact, profile=profile)
    assert {row.time_source for row in report.kernels} == {TimeSource.PROFILE}
    assert report.model_us == profile.model_us
    # A CPU's process has no count of its own.
    assert report.observed_bytes is None
    assert "device memory taken" not in render_page([report])


def test_memory_observed_on_a_gpu_is_on_the_page(artifact: Path) -> None:
    profile = Profile("a GPU", {}, 100.0, 123_000_000)
    report = report_artifact(artifact, profile=profile)
    assert report.to_json()["observed_bytes"] == 123_000_000
    assert "<b>123.00 MB</b>device memory taken" in render_page([report])


def test_a_database_alone_gives_one_report_for_a_model_and_device(database: TuningDatabase, tuned: Path) -> None:
    (report,) = report_database(database, ceilings=CEILINGS)
    by_artifact = report_artifact(tuned, ceilings=CEILINGS)
    assert report.model == "bert-tiny"
    assert report.kernels_us == pytest.approx(by_artifact.kernels_us)
    assert report.launches == by_artifact.launches
    shipped = load_manifest(tuned).kernels
    assert [one.note for one in shipped if one.note] == [
        "within noise, default kept: the fastest candidate took 9.5 us"
    ]
    kernels = {(kernel.route, kernel.record_id, kernel.latency_us) for kernel in shipped}
    for one in (report, by_artifact):
        assert {(row.route, row.record_id, row.time_us) for row in one.kernels} == kernels
    with_resources = report_artifact(tuned, database=database)
    assert {row.registers for row in report.kernels} == {row.registers for row in with_resources.kernels}
    assert report_database(database)[0].source.startswith("job ")


def test_a_database_says_that_a_model_ships_untuned_and_which_kernel_suits_it_better(
    database: TuningDatabase, tmp_path: Path
) -> None:
    (job,) = database.list_jobs()
    task = database.list_job_tasks(job.id)[0]
    own = next(one for one in database.list_records() if one.workload_hash == task.workload_hash)
    model = Workload("a" * 64, "model", '{"family":"model"}', job.model, 0.0, 0.0, None, task.tvm_version)
    own = replace(own, workload_hash=model.workload_hash, signature_key=model.signature_key, route=Route.TEMPLATE)

    def shipped(opened: TuningDatabase, **decided: object) -> Report:
        decision = json.dumps({"template": "model", "norm_rows_max": 0, "kernels": {}, **decided})
        made = replace(own, decision=decision, created_at=utc_now())
        opened.record_all(workloads=[model], records=[made])
        (found,) = report_database(opened)
        return found

    assert isinstance(database, TuningDatabase)
    with (
        sqlite3.connect(make_url(database.url).database or "") as own_file,
        sqlite3.connect(tmp_path / "copy.db") as file,
    ):
        own_file.backup(file)
    with TuningDatabase.open(tmp_path / "copy.db") as copy:
        assert "ships untuned" in " ".join(shipped(copy, untuned=True).notes)
        assert "ships untuned" not in " ".join(shipped(copy).notes)
        lucky = {task.workload_hash: [Route.METASCHEDULE.value, "[]"]}
        (taken,) = [row for row in shipped(copy, kernels=lucky).kernels if row.route == "metaschedule"]
        assert taken.time_us == 9.5


def test_an_empty_database_has_nothing_to_report(tmp_path: Path) -> None:
    with TuningDatabase.open(tmp_path / "empty.db") as empty:
        assert report_database(empty) == ()
    assert "No job of this database has a valid record" in render_page([])


def test_the_json_is_plain_data(tuned: Path, database: TuningDatabase) -> None:
    data = json.loads(json.dumps(report_artifact(tuned, database=database, ceilings=CEILINGS).to_json()))
    assert data["ceilings"]["source"] == "made up"
    assert data["planned_bytes"] > 0
    assert data["kernels"][0]["flops_per_s"] is None or data["kernels"][0]["flops_per_s"] > 0
    assert data["launches"] == sum(kernel["calls"] for kernel in data["kernels"])


def test_a_kernel_beyond_its_ceiling_is_told(tuned: Path) -> None:
    low = dataclasses.replace(CEILINGS, flops_per_s={"float32": 1e6})
    assert any("faster than the measured ceiling" in note for note in report_artifact(tuned, ceilings=low).notes)


def test_reports_do_not_touch_the_artifact(artifact_copy: Callable[[], Path]) -> None:
    copy = artifact_copy()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in copy.iterdir())
    report_artifact(copy)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in copy.iterdir()) == before


def test_rates_above_memorys_ceiling_are_told_of_a_cache(tuned: Path) -> None:
    slow = dataclasses.replace(CEILINGS, bytes_per_s=1.0)
    assert "their data came from a cache" in render_page([report_artifact(tuned, ceilings=slow)])
    fast = dataclasses.replace(CEILINGS, bytes_per_s=1e15)
    assert "came from a cache" not in render_page([report_artifact(tuned, ceilings=fast)])
