from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from relaxtune.pipeline.cli import doctor
from relaxtune.pipeline.cli.doctor import Finding, FindingStatus

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))


def test_pinned_versions_agree_with_the_project_file() -> None:
    dependencies = PROJECT["project"]["dependencies"]
    assert f"apache-tvm=={doctor.PINNED_TVM}" in dependencies
    assert f"apache-tvm-ffi=={doctor.PINNED_TVM_FFI}" in dependencies


@pytest.mark.slow
def test_every_check_reports_ok_or_a_fix() -> None:
    findings = doctor.run_checks()
    assert len(findings) == len(doctor.CHECKS)
    for finding in findings:
        assert finding.status is FindingStatus.OK or finding.fix, finding
    required = {finding.name: finding.status for finding in findings if finding.required}
    assert set(required.values()) == {FindingStatus.OK}, required


def test_tvm_pair_is_wrong_when_the_probe_crashes(monkeypatch) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(doctor, "PAIR_PROBE", crash)
    finding = doctor.check_tvm_pair()
    assert finding.status is FindingStatus.WRONG
    assert "-11" in finding.source
    assert f"apache-tvm-ffi=={doctor.PINNED_TVM_FFI}" in finding.fix


def test_probe_that_hangs_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "GPU_PROBE", "import time; time.sleep(30)")
    monkeypatch.setattr(doctor, "GPU_PROBE_TIMEOUT_S", 0.5)
    finding = doctor.check_gpu()
    assert finding.status is FindingStatus.WRONG
    assert "no answer within 0.5 s" in finding.source


def test_missing_package_names_the_extra_that_brings_it() -> None:
    finding = doctor.check_package("no-such-distribution", required=False, extra="cuda")
    assert finding == Finding(
        "no-such-distribution", FindingStatus.MISSING, "", "", False, "pip install 'relaxtune[cuda]'"
    )


@pytest.mark.slow
def test_missing_linker_says_how_to_get_one(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    finding = doctor.check_linker()
    assert finding.status is FindingStatus.MISSING
    assert "apt install g++" in finding.fix
    tools = {check().name: check() for check in doctor.CHECKS if check().name in ("ld", "nvcc")}
    assert {one.status for one in tools.values()} == {FindingStatus.MISSING}
    assert "binutils" in tools["ld"].fix


@pytest.mark.slow
def test_doctor_prints_every_check_and_its_fix(relaxtune) -> None:
    outcome = relaxtune("doctor", "--format", "json")
    assert outcome.code == 0
    findings = {finding["name"]: finding for finding in json.loads(outcome.stdout)}
    assert findings["tvm pair"]["status"] == "ok"
    if findings["torch"]["status"] == "missing":
        assert "relaxtune[export]" in relaxtune("doctor").stdout
