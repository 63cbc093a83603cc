"""What the pages of the dashboard show, over a real database and a real server; where there is a browser, in it too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.dashboard import pages, server
from relaxtune.pipeline.dashboard.artifact_pages import artifact as artifact_page, compare, gate, gates
from relaxtune.pipeline.dashboard.job_pages import job, task
from relaxtune.pipeline.dashboard.markup import Page
from relaxtune.pipeline.dashboard.pages import overview
from relaxtune.pipeline.dashboard.server import create_app
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.report.ceilings import Ceilings
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.gates import record_gate
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.tags import MoveKind, TagMove, record_move
from tests.pipeline.dashboard.conftest import Site, served
from tests.tuning_db.conftest import Samples

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_every_page_that_a_page_leads_to_answers_and_holds_no_markup_of_names(site: Site) -> None:
    seen, left = set[str](), ["/"]
    while left:
        address = left.pop()
        seen.add(address)
        reply, text = site.get(address)
        missing = address.startswith(("/artifacts/", "/compare"))  # their folders are not there
        assert reply.status == (503 if missing else 200), text
        assert "<script>alert" not in text
        assert "\x1b" not in text
        left += [link for link in re.findall(r'href="(/[^"]*)"', text) if link not in seen and link not in left]
    assert {address.split("/")[1] for address in seen} == {
        *("", "cost", "coverage", "gates", "jobs", "models", "tasks", "artifacts")
    }


def test_first_page_counts_records_and_names_tags(site: Site) -> None:
    text = site.get("/")[1]
    assert re.search(r"<b>2</b>records ok", text)
    assert re.search(r"<b>1</b>records build_error", text)
    assert text.count(">prod<") == 1


def test_a_live_page_that_takes_long_keeps_its_last_state() -> None:
    go_on, made = threading.Event(), list[str]()

    def make() -> Page:
        made.append("made")
        if len(made) > 1:
            go_on.wait(60)
        return Page(f"number {len(made)}", "", live=True)

    slow = server.SlowPages(0.2)
    while (first := slow.get("/", make)).waits:
        pass
    assert first.title == "number 1"
    assert slow.get("/", make).title == "number 1"
    go_on.set()
    deadline = time.monotonic() + 60
    while slow.get("/", make).title == "number 1":
        assert time.monotonic() < deadline


def test_page_of_a_job_that_runs_is_live_and_shows_tasks_and_causes(site: Site) -> None:
    _, text = site.get(f"/jobs/{site.job_id}")
    assert "<main data-live>" in text
    assert "<b>2 of 2</b>tasks with a time" in text
    assert "not over, or killed" in text
    assert "seconds from start to end" not in text
    assert text.count('href="/tasks/hash') == 2
    assert "Why candidates failed" in text


def test_tasks_stand_under_the_ceilings_of_the_jobs_device(kept: tuple[TuningDatabase, str]) -> None:
    database, job_id = kept
    bare = job(database, job_id, {}).body
    assert "none are known of EPYC 9654" in bare
    assert "<svg" not in bare
    ceilings = Ceilings("EPYC 9654", {"float32": 1e12}, 10e9, 1.0, "made up <&>")
    shown = job(database, job_id, {"EPYC 9654": ceilings}).body
    assert "Rates and ceilings" in shown
    assert "made up &lt;&amp;&gt;" in shown
    # 49,152 bytes and 524,288 FLOPs in 12.5 us.
    assert "<td>3.93</td><td>39.3%</td>" in shown
    assert "<td>41.9</td>" in shown


def test_history_of_a_task_tells_drivers_and_kernels_apart(tmp_path: Path) -> None:
    samples = Samples()
    work = samples.workload()
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        database.record_workload(work)
        for day, driver, made, us in ((1, "580.1", "a", 9.0), (3, "590<2>", "b", 6.0)):
            database.record_measurement(
                samples.record(
                    work,
                    target=samples.target("cuda", "sm_90a"),
                    environment=samples.gpu(driver=driver),
                    kernel_hash=made * 16,
                    code_version=None if day == 1 else "0.1.0+g<commit>",
                    latencies_us=(us,),
                    created_at=datetime(2026, 1, day, tzinfo=UTC),
                )
            )
        shown = task(database, work.workload_hash).body
    assert shown.count('aria-label="us, the best so far over days since 2026-01-01"') == 1
    assert "590&lt;2&gt;" in shown
    assert "<td>unknown</td>" in shown.replace(' class="left"', "")
    assert "0.1.0+g&lt;commit&gt;" in shown
    assert [f"<code>{name * 8}</code>" in shown for name in "ab"] == [True, True]


def test_coverage_page_links_models_and_counts_tasks(site: Site) -> None:
    _, text = site.get("/coverage")
    assert 'class="cover full"' in text
    assert ">2</span>" in text
    assert 'href="/models/' in text


def test_gates_stand_beside_artifacts_on_a_page_of_all_and_with_their_checks(artifact: Path, tmp_path: Path) -> None:
    checks = [
        {"name": "latency", "verdict": "no", "change": "+4 %", "reason": "<slow>"},
        {"name": "size", "verdict": "yes"},
    ]
    told = json.dumps({"passed": False, "checks": checks, "conditions": {"device": "<cpu>"}})
    manifest = load_manifest(artifact)
    other = Path(shutil.copytree(artifact, tmp_path / "other"))
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        assert "None yet" in gates(database).body
        new = artifact_of(manifest, artifact)
        old = artifact_of(replace(manifest, model_sha256="1" * 64), other)
        record_gate(database, old, new, passed=True, by="ben@host", report='{"checks":[]}')
        refused = record_gate(database, new, old, passed=False, by="ann@<host>", report=told)
        record_move(database, TagMove("prod", 1, MoveKind.TAG, old.key, "ann@host", "first"))
        record_move(database, TagMove("prod", 2, MoveKind.PROMOTE, new.key, "ann@host", "faster", told))
        assert f'<a href="/gates/{refused.id}">REFUSED (latency)</a>' in overview(database).body
        every = gates(database).body
        assert every.count('href="/gates/') == 2
        refusal = (
            r"<td[^>]*>REFUSED \(latency\)</td><td[^>]*>.*?</td><td[^>]*>\+4 %</td>.*?<td[^>]*>ann@&lt;host&gt;</td>"
        )
        assert re.search(refusal, every)
        one = gate(database, refused.id).body
        assert "&lt;slow&gt;" in one
        assert "device &lt;cpu&gt;" in one
        assert f'href="/compare?before={old.key}&amp;after={new.key}"' in one
        with pytest.raises(NotFoundError, match="no gate nowhere"):
            gate(database, "nowhere")
        own = artifact_page(database, new.key).body
        assert f'href="/gates/{refused.id}"' in own
        assert "refused, moved by force" in own
        beside = compare(database, old.key, new.key).body
    assert beside.count("the same kernel") == len(manifest.kernels)


def test_a_page_that_takes_long_is_answered_by_one_that_waits_and_made_once(
    kept: tuple[TuningDatabase, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, job_id = kept
    go_on, made = threading.Event(), list[str]()

    def slow(database: TuningDatabase) -> Page:
        made.append("once")
        go_on.wait(60)
        return Page("cost", "<h1>here it is</h1>")

    monkeypatch.setitem(pages.PAGES, "/cost", slow)
    with served(create_app(database, patience_s=0.01)) as port:
        site = Site(port, database, job_id)
        for _ in range(3):
            reply, text = site.get("/cost")
            assert reply.status == 200
            assert '<meta http-equiv="refresh"' in text
        go_on.set()
        deadline = time.monotonic() + 60
        while "here it is" not in (text := site.get("/cost")[1]):
            assert time.monotonic() < deadline
        assert '<meta http-equiv="refresh"' not in text
    assert made == ["once"]


def test_a_page_that_was_left_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, made = threading.Event(), list[str]()

    def make() -> Page:
        go_on.wait(60)
        made.append("made")
        return Page(f"number {len(made)}", "")

    slow = server.SlowPages(0.05)
    assert slow.get("/a", make).waits
    monkeypatch.setattr(server, "_KEPT_S", -1.0)  # every page is old once it is ready
    go_on.set()
    deadline = time.monotonic() + 60
    while not made:
        assert time.monotonic() < deadline
    while (page := slow.get("/a", make)).waits or page.title == "number 1":
        assert time.monotonic() < deadline
    assert page.title != "number 1"


def counted(app: ASGIApp, asked: list[str]) -> ASGIApp:
    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asked.append(str(scope["path"]))
        await app(scope, receive, send)

    return count


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")
def test_browser_renews_a_live_page_and_runs_no_name(kept: tuple[TuningDatabase, str], tmp_path: Path) -> None:
    database, job_id = kept
    asked: list[str] = []
    with served(counted(create_app(database), asked)) as port:
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        # Its clock runs ahead: ten seconds pass as quickly as the page lets them.
        command = [str(BROWSER), *options, "--virtual-time-budget=10000", "--dump-dom"]
        command.append(f"http://127.0.0.1:{port}/jobs/{job_id}")
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert asked.count(f"/jobs/{job_id}") > 1
    assert "tasks with a time" in shown
    assert "alert" in shown
    assert "<script>alert" not in shown
