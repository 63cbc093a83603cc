from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord, Workload
from tuning_db.store import TuningDatabase

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


# One more parameter makes the contract run over PostgreSQL.
@pytest.fixture(params=["sqlite-file", "sqlite-memory"])
def database(request: pytest.FixtureRequest, path: Path) -> Iterator[TuningDatabase]:
    url = {"sqlite-file": f"sqlite:///{path}", "sqlite-memory": "sqlite://"}[request.param]
    with TuningDatabase.open(url) as opened:
        yield opened


Python = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def python() -> Iterator[Python]:
    """Start `script` in a Python of its own, whose `sys.argv[1:]` are the arguments; it is gone when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
