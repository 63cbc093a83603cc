"""The page of a report: one file that fetches nothing, fits, and shows what is known."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markupsafe import Markup

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.dashboard.markup import Section, remark, sections
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.pages.render import code, number, page, percent, table
from relaxtune.pipeline.report.page import render_page
from relaxtune.pipeline.report.report import report_artifact, report_database
from relaxtune.tuning_db.artifacts import Benchmark
from relaxtune.tuning_db.records import utc_now
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.report.conftest import CEILINGS

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_is_one_file_that_fetches_nothing(tuned: Path, database: TuningDatabase) -> None:
    page = render_page([report_artifact(tuned, database=database, ceilings=CEILINGS)])
    assert page.count("<svg") == 2
    without_namespace = re.sub(r'xmlns(:xlink)?="http://www.w3.org/\d+/\w+"', "", page)
    assert not any(word in without_namespace for word in ("http:", "https:", "<script", "src=", "url('", "url(h"))
    assert "/encoder/layer.0/attention/query/MatMul" in page
    assert "never" in page


def test_names_cannot_break_the_page(tuned: Path) -> None:
    report = report_artifact(tuned, ceilings=CEILINGS)
    first = dataclasses.replace(report.kernels[0], name="<b>&", note="a < b", onnx_nodes=("<i>",))
    page = render_page([dataclasses.replace(report, model="<script>", kernels=(first,))])
    assert "<script>" not in page
    assert "<b>&" not in page
    assert "<i>" not in page


def test_the_key_of_bottlenecks_stands_where_one_is_named(tuned: Path) -> None:
    known = report_artifact(tuned, ceilings=CEILINGS)
    unknown = dataclasses.replace(
        known, kernels=tuple(dataclasses.replace(one, bottleneck=None) for one in known.kernels)
    )
    assert ['<p class="key">' in render_page([one]) for one in (known, unknown)] == [True, False]


def test_numbers_keep_three_digits() -> None:
    assert [number(value) for value in (None, 0.0, 0.01234, 12.34, 1234.5)] == ["", "0", "0.0123", "12.3", "1,234"]
    assert number(2.5e12, 1e12) == "2.5"
    assert [percent(value) for value in (None, 0.1234)] == ["", "12.3%"]


def test_a_page_does_not_run_over_and_leaves_empty_columns_out() -> None:
    shown = table(["kernel", "registers", "us"], [[code("a"), "", "1"], [code("b"), "", ""]], {"kernel"})
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
    body = sections(name, [Section("", remark(f"no time: {name}")), Section("", table(["task"], [[name]]))])
    body += Markup(f"<script>{measure}</script>")
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
    assert isinstance(database, TuningDatabase)
    (job,) = database.list_jobs()
    artifact = artifact_of(load_manifest(tuned), tuned, job.id)
    environment = database.get_record(1).environment
    database.record_artifact(artifact)
    moment = utc_now()
    for arm, latency_us in (("relaxtune", 500.0), ("<ort>", 1500.0)):
        database.record_benchmark(Benchmark(artifact.key, environment, arm, (latency_us,), created_at=moment))
    report = report_artifact(tuned, database=database)
    assert [(arm.arm, arm.latency_us) for arm in report.arms] == [("relaxtune", 500.0), ("<ort>", 1500.0)]
    data = json.loads(json.dumps(report.to_json()))
    assert {arm["arm"] for arm in data["arms"]} == {"relaxtune", "<ort>"}
    later = [(0.0, 900.0), (7.5, 700.0)]
    shown = render_page([dataclasses.replace(report, curve=tuple(later))])
    assert "Beside others" in shown
    assert "0.5 ms" in shown
    assert "<ort>" not in shown
    assert "Best so far" in shown
    assert "ms over seconds of tuning" in shown
    assert report_database(database)[0].arms == report.arms
    # Without a database, and without a curve, neither is there.
    alone = render_page([report_artifact(tuned)])
    assert "Beside others" not in alone
    assert "Best so far" not in alone
