"""What a measurement is true for (`Environment`) and what a kernel is compiled for (`TargetKey`)."""

from __future__ import annotations

import platform
from pathlib import Path

import tvm
import tvm_ffi
from tvm.target import codegen

from relaxtune.schedules.targets import PORTABLE, ResolvedTarget
from relaxtune.schedules.targets.capabilities import is_of
from relaxtune.tuning_db.records import Environment, TargetKey, canonical_json

# The device of a compile-only environment: a lookup with it accepts records of every device of the same architecture.
UNKNOWN_DEVICE = "unknown"

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER_VERSION = Path("/sys/module/nvidia/version")

# Parts of a target that say nothing about the code it gets: names, TVM's own search keys, the host's half, and whether
# PTX is kept beside the code.
_NOT_ATTRIBUTES = frozenset({"kind", "tag", "keys", "host", "device", PORTABLE})


def detect_environment(target: ResolvedTarget) -> Environment:
    """Return the environment of the device that would run code for `target` on this machine.

    A machine that cannot run the target (no GPU, or another architecture) gets `device_name` "unknown": such an
    environment serves look-ups for compiling, and no measurement may be stamped with it.
    """
    if target.kind == "cuda":
        return _cuda_environment(target)
    local = target.arch == str(codegen.llvm_get_system_cpu())
    return Environment(
        device_kind="cpu",
        device_name=cpu_name() if local else UNKNOWN_DEVICE,
        arch=target.arch,
        driver=None,
        cuda=None,
        tvm_version=tvm.__version__,
        tvm_ffi_version=tvm_ffi.__version__,
        cores=target_cores(target),
    )


def target_key(target: ResolvedTarget) -> TargetKey:
    """Return the database key of a target: kind, architecture and every attribute that shapes its code."""
    attributes = {name: _plain(value) for name, value in target.target.attrs.items() if name not in _NOT_ATTRIBUTES}
    return TargetKey(kind=target.kind, arch=target.arch, attributes=canonical_json(attributes))


def target_cores(target: ResolvedTarget) -> int | None:
    """Return the CPU cores a target's code may use, or None for a GPU."""
    return getattr(target.limits, "cores", None)


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's product name as the system tells it, else the machine's architecture."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Processor", "cpu model"}:
            return value.strip()
    return platform.processor() or platform.machine()


def nvidia_driver_version(path: Path = NVIDIA_DRIVER_VERSION) -> str | None:
    """Return the version of the loaded NVIDIA kernel module, such as 580.65.06, or None where the system hides it."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cuda_environment(target: ResolvedTarget) -> Environment:
    device = tvm.cuda(0)
    local = bool(device.exist) and is_of(target.arch, str(device.compute_version))
    return Environment(
        device_kind="cuda",
        device_name=str(device.device_name) if local else UNKNOWN_DEVICE,
        arch=target.arch,
        driver=nvidia_driver_version() if local else None,
        cuda=cuda_version(int(device.api_version)) if local else None,
        tvm_version=tvm.__version__,
        tvm_ffi_version=tvm_ffi.__version__,
        cores=None,
    )


def cuda_version(number: int) -> str:
    """Return 13.0 for 13000, the way CUDA's runtime numbers its versions."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _plain(value: object) -> object:
    """Return a TVM attribute as plain JSON data."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    items = getattr(value, "items", None)
    if callable(items):
        return {str(key): _plain(item) for key, item in items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return str(value)
