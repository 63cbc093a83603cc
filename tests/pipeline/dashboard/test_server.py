"""What the dashboard's server answers and refuses, and the command that starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.dashboard.server import create_app
from relaxtune.tuning_db.store import TuningDatabase
from tests import warm_python
from tests.pipeline.dashboard.conftest import PATIENT, Site, served


@pytest.mark.parametrize("address", ["/jobs/none", "/tasks/none", "/models/none", "/artifacts/none", "/none"])
def test_what_is_not_there_is_404_with_its_name(site: Site, address: str) -> None:
    reply, text = site.get(address)
    assert reply.status == 404
    assert "none" in text


@pytest.mark.parametrize("address", ["/", "/none", "/live.js"])
def test_answers_forbid_foreign_scripts_and_frames(site: Site, address: str) -> None:
    reply, _ = site.get(address)
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 400), ("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:8760", 200)]
)
def test_only_names_of_this_machine_are_answered(site: Site, host: str, status: int) -> None:
    reply, _ = site.get("/", Host=host)
    assert reply.status == status


def test_nothing_writes(site: Site) -> None:
    assert site.ask("POST", f"/jobs/{site.job_id}")[0].status == 405


def test_token_is_asked_for_then_kept_in_a_cookie(kept: tuple[TuningDatabase, str]) -> None:
    database, job_id = kept
    with served(create_app(database, token="secret", patience_s=PATIENT)) as port:
        site = Site(port, database, job_id)
        assert site.get("/")[0].status == 401
        assert site.get("/?token=wrong")[0].status == 401
        reply, _ = site.get("/?token=secret")
        assert (reply.status, reply.headers["Location"]) == (303, "/")
        cookie = reply.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert site.get("/", Cookie=cookie.partition(";")[0])[0].status == 200
        assert site.get("/", Cookie="relaxtune_token=wrong")[0].status == 401


@pytest.mark.parametrize("path", ["//example.org", "///example.org/x", "/%2Fexample.org", "/%5C%5Cexample.org", "//"])
def test_no_path_leads_to_another_host(kept: tuple[TuningDatabase, str], path: str) -> None:
    database, job_id = kept
    with served(create_app(database, token="secret", patience_s=PATIENT)) as port:
        reply, _ = Site(port, database, job_id).get(f"{path}?token=secret")
    assert reply.status == 303
    assert re.fullmatch(r"/(?![/\\\\]).*", reply.headers["Location"])


def test_command_tells_its_address_and_ends_with_ctrl_c(site: Site) -> None:
    code = "from relaxtune.pipeline.cli import main; main()"
    command = [sys.executable, "-c", code, "dashboard", "--db", site.database.url, "--port", "0"]
    with warm_python.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline() if process.stderr else ""
        found = re.search(r"http://127\.0\.0\.1:(\d+)/ shows", line)
        assert found, line
        for _ in range(200):
            try:
                reply, _ = replace(site, port=int(found[1])).get("/")
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        assert reply.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_command_refuses_a_port_that_is_taken(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dashboard", "--db", site.database.url, "--port", str(site.port)])
    assert ended.value.code == 2
    assert f"cannot listen at 127.0.0.1:{site.port}" in capsys.readouterr().err
