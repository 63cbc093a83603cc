"""Reports of real artifacts and databases: times, shares, rates, bottlenecks, and what is said to be missing."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import make_url

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.kernel_hash import made_hash
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.report.ceilings import Ceilings
from relaxtune.pipeline.report.html import notes, number, page, percent, render_page, table
from relaxtune.pipeline.report.kernel import Bottleneck, KernelRow, TimeSource, find_bottleneck, judged
from relaxtune.pipeline.report.plot import roofline, shares
from relaxtune.pipeline.report.profile import Profile, profile_artifact
from relaxtune.pipeline.report.progress import Progress
from relaxtune.pipeline.report.report import Report, report_artifact, report_database
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.artifacts import Benchmark
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.records import Route, Status, TuningRecord, Workload, utc_now
from relaxtune.tuning_db.store import SqlDatabase

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
CEILINGS = Ceilings("test", {"float32": 1e12}, 10e9, 1.0, "made up")


@pytest.fixture(scope="module")
def database(
    tasks: list[TuningTask],
    quick_target: ResolvedTarget,
    bert_tiny: OnnxModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> TuningDatabase:
    """A database with a fallback's record of each task, 10 us for the first and 1 us more for each that follows."""
    opened = SqlDatabase.open(tmp_path_factory.mktemp("report") / "tuning.db")
    target, environment = target_key(quick_target), detect_environment(quick_target)
    job = opened.start_job(model=bert_tiny.name, model_sha256=bert_tiny.sha256, target=target)
    records, workloads = [], []
    for index, task in enumerate(tasks):
        workload = Workload(
            task.workload_hash, task.family, task.signature, task.name, task.flops, task.bytes, None,
            environment.tvm_version,
        )  # fmt: skip
        workloads.append(workload)
        records.append(
            TuningRecord(
                workload.workload_hash, workload.signature_key, target, environment, Route.FALLBACK, "{}", Status.OK,
                (9.0 + index, 10.0 + index, 11.0 + index), registers=40 + index, smem_bytes=1024, spill_bytes=0,
                job_id=job.id,
                kernel_hash=made_hash(apply_fallback(task.mod, quick_target.target)["main"], quick_target.target),
            )
        )  # fmt: skip
    # Faster, but within what the fallback's latencies scatter: it ships nowhere.
    lucky = replace(records[0], route=Route.METASCHEDULE, decision="[]", latencies_us=(9.5,), registers=99)
    opened.record_all(workloads=workloads, records=[*records, lucky])
    opened.record_job_tasks(
        job.id,
        [JobTask(t.workload_hash, environment.tvm_version, t.weight, t.onnx_nodes, 0.1) for t in tasks],
    )
    return opened


@pytest.fixture(scope="module")
def tuned(
    database: TuningDatabase,
    lowered: LoweredModule,
    tasks: list[TuningTask],
    quick_target: ResolvedTarget,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An artifact compiled from that database."""
    choices = select_kernels(
        lowered, tasks, database=database, target=quick_target, environment=detect_environment(quick_target)
    )
    directory = tmp_path_factory.mktemp("tuned") / "bert-tiny"
    write_artifact(compile_module(lowered, choices, quick_target), directory)
    return directory


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
    with SqlDatabase.open(tmp_path / "other.db") as empty:
        report = report_artifact(tuned, database=empty)
    assert any("lacks the records of" in note and "compiled from?" in note for note in report.notes)
    assert all(row.time_us for row in report.kernels)


def test_an_untuned_artifact_says_that_it_has_no_times(artifact: Path) -> None:
    report = report_artifact(artifact)
    assert report.kernels_us == 0.0
    assert any("have no time and no share" in note and "and 15 more" in note for note in report.notes)
    assert any("no ceilings are known" in note for note in report.notes)
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

    assert isinstance(database, SqlDatabase)
    with (
        sqlite3.connect(make_url(database.url).database or "") as own_file,
        sqlite3.connect(tmp_path / "copy.db") as file,
    ):
        own_file.backup(file)
    with SqlDatabase.open(tmp_path / "copy.db") as copy:
        assert "ships untuned" in " ".join(shipped(copy, untuned=True).notes)
        assert "ships untuned" not in " ".join(shipped(copy).notes)
        lucky = {task.workload_hash: [Route.METASCHEDULE.value, "[]"]}
        (taken,) = [row for row in shipped(copy, kernels=lucky).kernels if row.route == "metaschedule"]
        assert taken.time_us == 9.5


def test_an_empty_database_has_nothing_to_report(tmp_path: Path) -> None:
    with SqlDatabase.open(tmp_path / "empty.db") as empty:
        assert report_database(empty) == ()
    assert "No job of this database has a valid record" in render_page([])


def test_the_json_is_plain_data(tuned: Path, database: TuningDatabase) -> None:
    data = json.loads(json.dumps(report_artifact(tuned, database=database, ceilings=CEILINGS).to_json()))
    assert data["ceilings"]["source"] == "made up"
    assert data["planned_bytes"] > 0
    assert data["kernels"][0]["flops_per_s"] is None or data["kernels"][0]["flops_per_s"] > 0
    assert data["launches"] == sum(kernel["calls"] for kernel in data["kernels"])


def test_the_page_is_one_file_that_fetches_nothing(tuned: Path, database: TuningDatabase) -> None:
    page = render_page([report_artifact(tuned, database=database, ceilings=CEILINGS)])
    assert page.count("<svg") == 2
    without_namespace = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not any(word in without_namespace for word in ("http:", "https:", "<script", "src=", "url("))
    assert "/encoder/layer.0/attention/query/MatMul" in page
    assert "never" in page


def test_names_cannot_break_the_page(tuned: Path) -> None:
    report = report_artifact(tuned, ceilings=CEILINGS)
    first = dataclasses.replace(report.kernels[0], name="<b>&", note="a < b", onnx_nodes=("<i>",))
    page = render_page([dataclasses.replace(report, model="<script>", kernels=(first,))])
    assert "<script>" not in page
    assert "<b>&" not in page
    assert "<i>" not in page


@pytest.mark.parametrize(
    ("time_us", "compute", "bandwidth", "launch", "expected"),
    [
        (100.0, 0.8, 0.3, 2.0, Bottleneck.COMPUTE),
        (100.0, 0.3, 0.8, 2.0, Bottleneck.BANDWIDTH),
        (100.0, 0.6, 0.6, 2.0, Bottleneck.COMPUTE),
        (3.0, 0.1, 0.2, 2.0, Bottleneck.LAUNCH),
        (3.0, 0.1, 0.9, 2.0, Bottleneck.BANDWIDTH),
        (100.0, 0.1, 0.2, 2.0, Bottleneck.LATENCY),
        (100.0, 0.1, 0.2, None, Bottleneck.LATENCY),
        (100.0, 0.1, 3.0, 2.0, Bottleneck.LATENCY),
        (3.0, None, 3.0, 2.0, Bottleneck.LAUNCH),
        (3.0, None, None, 2.0, None),
    ],
)
def test_the_bottleneck_is_the_unit_near_its_ceiling_else_the_launch_else_latency(
    time_us: float, compute: float | None, bandwidth: float | None, launch: float | None, expected: Bottleneck | None
) -> None:
    assert find_bottleneck(time_us, compute, bandwidth, launch) is expected


def test_the_fastest_kernel_stands_for_a_launch() -> None:
    rows = [row(name, time_us) for name, time_us in (("small", 1.0), ("twice", 2.0), ("large", 50.0))]
    for launch_us in (None, 0.3):
        found = {one.name: one.bottleneck for one in judged(rows, dataclasses.replace(CEILINGS, launch_us=launch_us))}
        assert found == {"small": Bottleneck.LAUNCH, "twice": Bottleneck.LAUNCH, "large": Bottleneck.LATENCY}


def test_a_fast_kernel_does_not_stand_for_a_launch_when_launches_are_far_faster() -> None:
    (found,) = judged([row("large", 50.0)], dataclasses.replace(CEILINGS, launch_us=1.0))
    assert found.bottleneck is Bottleneck.LATENCY


def row(name: str, time_us: float | None) -> KernelRow:
    return KernelRow(name, "norm", (), 1, "fallback", None, time_us=time_us, flops=1.0, bytes=10.0, dtype="float32")


def test_kernels_without_a_time_take_no_share() -> None:
    found = judged([row("a", 1.0), row("b", None)], CEILINGS)
    assert [(one.name, one.share) for one in found] == [("a", 1.0), ("b", None)]
    assert shares([found[1]]) == ""


def test_a_roofline_needs_a_bandwidth_ceiling_and_a_point() -> None:
    found = judged([row("a", 1.0)], CEILINGS)
    assert roofline(found, CEILINGS).startswith("<svg")
    assert roofline(found, dataclasses.replace(CEILINGS, bytes_per_s=None)) == ""
    assert roofline(judged([row("b", None)], CEILINGS), CEILINGS) == ""
    assert roofline(found, None) == ""


def test_the_key_of_bottlenecks_stands_where_one_is_named(tuned: Path) -> None:
    known = report_artifact(tuned, ceilings=CEILINGS)
    unknown = dataclasses.replace(
        known, kernels=tuple(dataclasses.replace(one, bottleneck=None) for one in known.kernels)
    )
    assert ['<p class="key">' in render_page([one]) for one in (known, unknown)] == [True, False]


def test_a_kernel_beyond_its_ceiling_is_told(tuned: Path) -> None:
    low = dataclasses.replace(CEILINGS, flops_per_s={"float32": 1e6})
    assert any("faster than the ceiling" in note for note in report_artifact(tuned, ceilings=low).notes)


def test_numbers_keep_three_digits() -> None:
    assert [number(value) for value in (None, 0.0, 0.01234, 12.34, 1234.5)] == ["", "0", "0.0123", "12.3", "1,234"]
    assert number(2.5e12, 1e12) == "2.5"
    assert [percent(value) for value in (None, 0.1234)] == ["", "12.3%"]


def test_reports_do_not_touch_the_artifact(artifact_copy: Callable[[], Path]) -> None:
    copy = artifact_copy()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in copy.iterdir())
    report_artifact(copy)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in copy.iterdir()) == before


def test_a_page_does_not_run_over_and_leaves_empty_columns_out() -> None:
    shown = table(["kernel", "registers", "us"], [["<code>a</code>", "", "1"], ["<code>b</code>", "", ""]], {"kernel"})
    assert shown.startswith('<div class="wide"><table>')
    assert re.findall(r"<th(?: [^>]*)?>([^<]*)", shown) == ["kernel", "us"]
    assert shown.count("<td") == 4
    # What is wider than the page scrolls by itself, and a cell with a name is not squeezed.
    styles = page("t", shown)
    assert ".wide { overflow-x: auto }" in styles
    assert "@media print" in styles
    assert "td:has(code) { min-width: 16rem }" in styles
    assert "width=device-width" in styles
    # A moment stays on one line, and words of any length keep a width.
    kinds = table(["s", "began (UTC)", "why", "job"], [["1", "2026-11-24 09:20", "because", "a"]], {"job"})
    assert re.findall(r'<td(?: class="(\w+)")?>', kinds) == ["", "when", "text", "left"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")
def test_a_long_name_does_not_widen_the_page(tmp_path: Path) -> None:
    name, file = "fused_" * 40, tmp_path / "page.html"
    measure = "const all = document.documentElement; document.title = all.scrollWidth - all.clientWidth"
    body = f"<h1>{name}</h1>{notes([f'no time: {name}'])}{table(['task'], [[name]])}<script>{measure}</script>"
    file.write_text(page("t", body), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=500,800",
        f"--user-data-dir={tmp_path / 'user'}",
    ]
    command = [str(BROWSER), *options, "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<title>0</title>" in shown


def test_a_note_that_all_kernels_have_is_told_once(tuned: Path) -> None:
    found = report_artifact(tuned)
    kernels = tuple(dataclasses.replace(one, note="untuned: so") for one in found.kernels)
    page_of_all = render_page([dataclasses.replace(found, kernels=kernels)])
    assert f"For all {len(kernels)} kernels: untuned: so." in page_of_all
    assert page_of_all.count("untuned: so") == 1
    apart = (dataclasses.replace(kernels[0], note="another"), *kernels[1:])
    assert render_page([dataclasses.replace(found, kernels=apart)]).count("untuned: so") == len(kernels) - 1


def test_peers_and_the_course_of_the_tuning_are_on_the_page_of_a_noted_artifact(
    tuned: Path, database: TuningDatabase
) -> None:
    assert isinstance(database, SqlDatabase)
    (job,) = database.list_jobs()
    artifact = artifact_of(load_manifest(tuned), tuned, job.id)
    environment = database.get_record(1).environment
    database.record_artifact(artifact)
    moment = utc_now()
    for arm, latency_us in (("relaxtune", 500.0), ("<ort>", 1500.0)):
        database.record_benchmark(Benchmark(artifact.key, environment, arm, (latency_us,), created_at=moment))
    report = report_artifact(tuned, database=database)
    assert [(arm.arm, arm.latency_us) for arm in report.progress.arms] == [("relaxtune", 500.0), ("<ort>", 1500.0)]
    data = json.loads(json.dumps(report.to_json()))
    assert {arm["arm"] for arm in data["arms"]} == {"relaxtune", "<ort>"}
    later = [(0.0, 900.0), (7.5, 700.0)]
    shown = render_page([dataclasses.replace(report, progress=Progress(tuple(later), report.progress.arms))])
    assert "Beside others" in shown
    assert "0.5 ms" in shown
    assert "<ort>" not in shown
    assert "Best so far" in shown
    assert "ms over seconds of tuning" in shown
    by_job = report_database(database)[0].progress
    assert by_job.arms == report.progress.arms
    # Without a database, and without a curve, neither is there.
    alone = render_page([report_artifact(tuned)])
    assert "Beside others" not in alone
    assert "Best so far" not in alone


def test_rates_above_memorys_ceiling_are_told_of_a_cache(tuned: Path) -> None:
    slow = dataclasses.replace(CEILINGS, bytes_per_s=1.0)
    assert "their data came from a cache" in render_page([report_artifact(tuned, ceilings=slow)])
    fast = dataclasses.replace(CEILINGS, bytes_per_s=1e15)
    assert "came from a cache" not in render_page([report_artifact(tuned, ceilings=fast)])
