from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.sql.schema import Base
from relaxtune.tuning_db.store import TuningDatabase
from tests import warm_python
from tests.tuning_db.postgres_server import running_server

TVM_VERSION = "0.27.0.post1"


@dataclass(frozen=True)
class Samples:
    """Makes values that are true and differ only where a test says so."""

    def environment(self, **changes: object) -> Environment:
        fields: dict[str, object] = {
            "device_kind": "cpu",
            "device_name": "EPYC 9654",
            "arch": "znver4",
            "driver": None,
            "cuda": None,
            "tvm_version": TVM_VERSION,
            "tvm_ffi_version": "0.1.14.post1",
            "cores": 2,
        }
        return Environment(**{**fields, **changes})

    def gpu(self, **changes: object) -> Environment:
        gpu = {"device_kind": "cuda", "device_name": "NVIDIA H200", "arch": "sm_90a", "driver": "580.1", "cuda": "13.0"}
        return self.environment(**{**gpu, **changes})

    def target(self, kind: str = "llvm", arch: str = "znver4", attributes: str = "{}") -> TargetKey:
        return TargetKey(kind, arch, attributes)

    def workload(self, number: int = 1, **changes: object) -> Workload:
        fields: dict[str, object] = {
            "workload_hash": f"hash{number}",
            "family": "matmul",
            "signature": f'{{"family":"matmul","dims":[{number},64,64],"dtypes":["float32"],"epilogue":[]}}',
            "name": f"matmul{number}",
            "flops": 524288.0,
            "bytes": 49152.0,
            "ir_json": '{"ir":1}',
            "tvm_version": TVM_VERSION,
        }
        return Workload(**{**fields, **changes})

    def record(self, workload: Workload | None = None, **changes: object) -> TuningRecord:
        workload = workload or self.workload()
        fields: dict[str, object] = {
            "workload_hash": workload.workload_hash,
            "signature_key": workload.signature_key,
            "target": self.target(),
            "environment": self.environment(),
            "route": Route.METASCHEDULE,
            "decision": "[[],[]]",
            "status": Status.OK,
            "latencies_us": (12.5, 11.5, 13.5),
            "duration_s": 0.25,
        }
        return TuningRecord(**{**fields, **changes})

    def failure(self, workload: Workload | None = None, **changes: object) -> TuningRecord:
        fields = {"status": Status.BUILD_ERROR, "latencies_us": (), "error": "no such intrinsic"}
        return self.record(workload, **{**fields, **changes})


@pytest.fixture(scope="session")
def samples() -> Samples:
    return Samples()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Return the URL of a running server's database `postgres`."""
    with running_server() as url:
        yield url


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: str) -> str:
    """Return the URL of a database with our tables, which tests share one after another."""
    url = new_database(postgres_server, "shared")
    TuningDatabase.open(url).close()
    return url


@pytest.fixture
def postgres_url(migrated_postgres: str) -> str:
    """Return the URL of a database with our tables, all empty and counting from 1."""
    tables = ", ".join(Base.metadata.tables)
    with psycopg.connect(migrated_postgres, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
    return migrated_postgres


@pytest.fixture
def empty_postgres(request: pytest.FixtureRequest, postgres_server: str) -> str:
    """Return the URL of a database without tables, of this test alone."""
    return new_database(postgres_server, f"t{abs(hash(request.node.nodeid))}")


def new_database(server: str, name: str) -> str:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return server.replace("/postgres?", f"/{name}?")


@pytest.fixture(params=["sqlite-file", "sqlite-memory", "postgresql"])
def database_url(request: pytest.FixtureRequest, path: Path) -> str:
    return url_of(request.param, request, path)


def url_of(kind: str, request: pytest.FixtureRequest, path: Path) -> str:
    if kind == "postgresql":
        # Started by the first test that needs it, not by those over SQLite.
        return str(request.getfixturevalue("postgres_url"))
    return {"sqlite-file": f"sqlite:///{path}", "sqlite-memory": "sqlite://"}[kind]


@pytest.fixture(scope="session")
def empty_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with our tables, which tests copy: to make them takes ten times as long."""
    path = tmp_path_factory.mktemp("empty") / "tuning.db"
    TuningDatabase.open(path).close()
    return path


@pytest.fixture(params=["sqlite-file", "sqlite-memory", "postgresql", "layers"])
def database(request: pytest.FixtureRequest, path: Path, tmp_path: Path, empty_file: Path) -> Iterator[TuningDatabase]:
    """Return an empty database of every form that the contract has."""
    if request.param in ("sqlite-file", "layers"):
        shutil.copy(empty_file, path)
    if request.param == "layers":
        urls = [f"sqlite:///{path}", shutil.copy(empty_file, tmp_path / "shared.db")]
    else:
        urls = [url_of(request.param, request, path)]
    with open_databases(urls) as opened:
        yield opened


Python = Callable[..., "subprocess.Popen[str]"]
_WARNINGS_ARE_ERRORS = "import warnings; warnings.simplefilter('error')\n"


@pytest.fixture
def python() -> Iterator[Python]:
    """Start `script` in a warm Python of its own, whose `sys.argv[1:]` are the arguments; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _WARNINGS_ARE_ERRORS + script, *map(str, arguments)]
        process = warm_python.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
