"""`relaxtune doctor` and `relaxtune cluster`: packages and devices here or on nodes, and how to get missing ones.

Each check is one function that returns a `Finding`; `CHECKS` is the list of them all. A check never raises: what it
could not find is its finding, with the fix. `REQUIRED` findings that are not ok make `relaxtune doctor` exit 1;
optional ones (a GPU, CUDA's compiler) only say what would be missing.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from relaxtune.pipeline.cli.options import FormatOption
from relaxtune.pipeline.cli.output import OutputFormat, emit
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.printed_tables import TableView

# The pair the project pins; pyproject.toml is checked against it by a test.
PINNED_TVM = "0.27.0.post1"
PINNED_TVM_FFI = "0.1.14.post1"

PAIR_PROBE_TIMEOUT_S = 60
# Serialising any module goes through ToJSONGraph, where a wrong tvm-ffi segfaults.
PAIR_PROBE = """
import tvm
from tvm import te
a = te.placeholder((4,), name="a")
b = te.compute((4,), lambda i: a[i] + 1.0, name="b")
tvm.ir.load_json(tvm.ir.save_json(tvm.IRModule({"main": te.create_prim_func([a, b])})))
"""

GPU_PROBE_TIMEOUT_S = 60
GPU_PROBE = """
import tvm
device = tvm.cuda(0)
print(f"{device.device_name}, compute capability {device.compute_version}" if device.exist else "")
"""


class FindingStatus(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    MISSING = "missing"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: what was found, from where, and the fix when it is not ok."""

    name: str
    status: FindingStatus
    found: str
    source: str
    required: bool
    fix: str = ""


def check_python() -> Finding:
    """Return whether this Python is one that the project supports."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    status = FindingStatus.OK if supported else FindingStatus.WRONG
    return Finding("python", status, found, sys.executable, True, "" if supported else "use Python 3.11 or 3.12")


def check_package(distribution: str, *, required: bool = True, extra: str | None = None) -> Finding:
    """Return the installed version of a distribution and the folder it lies in."""
    try:
        package = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        fix = f"pip install 'relaxtune[{extra}]'" if extra else "pip install relaxtune"
        return Finding(distribution, FindingStatus.MISSING, "", "", required, fix)
    return Finding(distribution, FindingStatus.OK, package.version, str(package.locate_file("")), required)


def check_tvm_pair() -> Finding:
    """Return whether the installed tvm and tvm-ffi work together, tried in a subprocess that may crash."""
    versions = []
    for distribution, pinned in (("apache-tvm", PINNED_TVM), ("apache-tvm-ffi", PINNED_TVM_FFI)):
        finding = check_package(distribution)
        versions.append(f"{distribution} {finding.found or 'missing'} (pinned {pinned})")
    fix = f"pip install apache-tvm=={PINNED_TVM} apache-tvm-ffi=={PINNED_TVM_FFI}"
    found = ", ".join(versions)
    outcome = _run_probe(PAIR_PROBE, PAIR_PROBE_TIMEOUT_S)
    if outcome.returncode == 0:
        return Finding("tvm pair", FindingStatus.OK, found, "serialised a module in a subprocess", True)
    # A negative return code is the signal that ended the probe: -11 for a segmentation fault.
    how = f"the probe ended with code {outcome.returncode}: {last_line(outcome.stderr)}"
    return Finding("tvm pair", FindingStatus.WRONG, found, how, True, fix)


def check_linker() -> Finding:
    """Return the C++ compiler that links exported `.so` files."""
    path = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if path is None:
        fix = "install g++ or clang (Debian: apt install g++)"
        return Finding("C++ linker", FindingStatus.MISSING, "", "PATH", True, fix)
    return Finding("C++ linker", FindingStatus.OK, Path(path).name, path, True)


def check_tool(name: str, wanted: str, fix: str, *, required: bool) -> Finding:
    """Return a program of the path with the first line of its `--version` that holds a word."""
    path = shutil.which(name)
    if path is None:
        return Finding(name, FindingStatus.MISSING, "", "PATH", required, fix)
    outcome = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    line = next((line.strip() for line in outcome.stdout.splitlines() if wanted in line), "")
    return Finding(name, FindingStatus.OK, line, str(Path(path).resolve()), required)


def check_cpu() -> Finding:
    """Return what `--target llvm` resolves to on this machine."""
    from relaxtune.schedules.targets import resolve_target

    resolved = resolve_target("llvm")
    cores = f"{resolved.target.attrs['num-cores']} cores"
    return Finding("CPU target", FindingStatus.OK, f"llvm {resolved.arch}, {cores}", resolved.source, True)


def check_gpu() -> Finding:
    """Return the CUDA device, found in a subprocess because a broken driver can end the process."""
    outcome = _run_probe(GPU_PROBE, GPU_PROBE_TIMEOUT_S)
    if outcome.returncode != 0:
        how = f"the probe ended with code {outcome.returncode}: {last_line(outcome.stderr)}"
        return Finding("CUDA device", FindingStatus.WRONG, "", how, False, "check the driver with nvidia-smi")
    found = outcome.stdout.strip()
    if not found:
        fix = "needed to tune and run on a GPU only; `--target cuda:sm_90a` compiles without"
        return Finding("CUDA device", FindingStatus.MISSING, "", "tvm.cuda(0)", False, fix)
    return Finding("CUDA device", FindingStatus.OK, found, "tvm.cuda(0)", False)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_tvm_pair,
    lambda: check_package("onnx"),
    lambda: check_package("onnxruntime"),
    lambda: check_package("onnxscript"),
    lambda: check_package("numpy"),
    lambda: check_package("xgboost-cpu"),
    lambda: check_package("sqlalchemy"),
    lambda: check_package("alembic"),
    check_linker,
    # Tuning links its candidates with it.
    lambda: check_tool("ld", "", "install binutils (Debian: apt install binutils)", required=True),
    check_cpu,
    check_gpu,
    lambda: check_package("nvidia-cuda-nvrtc", required=False, extra="cuda"),
    lambda: check_package("cuda-bindings", required=False, extra="cuda"),
    lambda: check_package("nvidia-nvfatbin", required=False, extra="cuda"),
    lambda: check_tool("nvcc", "release", "not needed where NVRTC is installed", required=False),
    lambda: check_package("nvidia-cublas", required=False, extra="cublas"),
    lambda: check_package("nvidia-cudnn-cu13", required=False, extra="cudnn"),
    lambda: check_package("torch", required=False, extra="export"),
)


def run_checks() -> tuple[Finding, ...]:
    """Return the findings of every check, in the order of `CHECKS`."""
    return tuple(check() for check in CHECKS)


def _run_probe(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {timeout_s} s")


def doctor(output_format: FormatOption = OutputFormat.TABLE) -> None:
    """List what is installed and what is missing, with the remedy. Exits 1 if a required part is missing."""
    findings = run_checks()
    columns = {
        "check": lambda finding: finding.name,
        "status": lambda finding: finding.status.value,
        "found": lambda finding: finding.found,
        "where": lambda finding: finding.source,
    }
    # Below the table, so that no column folds a command to copy.
    fixes = "\n".join(f"{one.name}: {one.fix}" for one in findings if one.fix)
    emit(output_format, [asdict(one) for one in findings], TableView.of("relaxtune doctor", findings, columns, fixes))
    if any(finding.required and finding.status is not FindingStatus.OK for finding in findings):
        raise typer.Exit(1)


cluster = typer.Typer(help="Look at a Ray cluster.", no_args_is_help=True)


@cluster.callback()
def _group() -> None:
    """Look at a Ray cluster."""


@cluster.command()
def check(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Such as 10.0.0.1:6379, or auto on a node of it.")],
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """List what each node has and lacks, and other versions. Exits 1 if a node is not ready."""
    from relaxtune.pipeline.tuning.ray.cluster import check_cluster

    found = check_cluster(address)
    columns = {
        "node": lambda one: one.host,
        "CPUs": lambda one: one.cpus,
        "measures on": lambda one: ", ".join(one.devices) or None,
        "status": lambda one: "ok" if one.ok else "NOT OK",
        "what to do": lambda one: "; ".join(one.faults) or None,
    }
    emit(output_format, [asdict(one) for one in found], TableView.of(f"cluster {address}", found, columns))
    if not all(one.ok for one in found):
        raise typer.Exit(1)
