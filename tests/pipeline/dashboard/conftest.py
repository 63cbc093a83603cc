"""A database with a job that runs and whose names try to be HTML, and a dashboard of it that answers at a port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse

import pytest
import uvicorn
from starlette.types import ASGIApp

from relaxtune.pipeline.dashboard.server import create_app
from relaxtune.tuning_db.artifacts import Artifact
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.tags import MoveKind, TagMove, record_move
from tests.tuning_db.conftest import Samples

HOSTILE = "<script>alert('x')</script>\x1b[31m\"&"
# On a machine busy with other work, a test waits for the page itself.
PATIENT = 120.0


@dataclass(frozen=True)
class Site:
    """A dashboard that answers at a port, and the database behind it, open for writing."""

    port: int
    database: TuningDatabase
    job_id: str

    def get(self, address: str, **headers: str) -> tuple[HTTPResponse, str]:
        return self.ask("GET", address, **headers)

    def ask(self, method: str, address: str, **headers: str) -> tuple[HTTPResponse, str]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, address, headers=headers)
            reply = connection.getresponse()
            return reply, reply.read().decode()


@contextmanager
def served(app: ASGIApp) -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    socket = server.config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield socket.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TuningDatabase, str]]:
    """Return a database with a job that runs, whose names try to be HTML, and two artifacts of its model."""
    samples = Samples()
    with TuningDatabase.open(tmp_path_factory.mktemp("dashboard") / "tuning.db") as database:
        works = [samples.workload(number, name=HOSTILE) for number in (1, 2)]
        for work in works:
            database.record_workload(work)
        target = samples.target()
        job = database.start_job(model=HOSTILE, model_sha256="0" * 64, target=target)
        tasks = [JobTask(work.workload_hash, work.tvm_version, 2, (HOSTILE,), 1.0) for work in works]
        database.record_job_tasks(job.id, tasks)
        database.record_measurements([samples.record(work, job_id=job.id) for work in works])
        database.record_measurement(samples.failure(works[0], job_id=job.id, error=HOSTILE))
        for number in (1, 2):
            artifact = Artifact(HOSTILE, "0" * 64, target, f'{{"number":{number}}}', f"/nowhere/{number}", job.id)
            database.record_artifact(artifact)
        record_move(database, TagMove("prod", 1, MoveKind.TAG, artifact.key, "ann@host", HOSTILE))
        yield database, job.id


@pytest.fixture(scope="module")
def site(kept: tuple[TuningDatabase, str]) -> Iterator[Site]:
    database, job_id = kept
    with (
        TuningDatabase.open(database.url, mode=Mode.READ_ONLY) as reading,
        served(create_app(reading, patience_s=PATIENT)) as port,
    ):
        yield Site(port, database, job_id)
