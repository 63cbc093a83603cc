"""Conditions of a measurement (`Environment`), the target of a kernel (`TargetKey`), and the version of the code.

Commands that compile and run nothing ask for names alone: TVM is imported by the functions that ask it.
"""

from __future__ import annotations

import getpass
import logging
import os
import platform
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import relaxtune
from relaxtune.tuning_db.records import Environment, TargetKey, canonical_json

if TYPE_CHECKING:
    from relaxtune.schedules.targets import ResolvedTarget

logger = logging.getLogger(__name__)

# The device of a compile-only environment: a lookup with it accepts records of every device of the same architecture.
UNKNOWN_DEVICE = "unknown"

_COMMIT_DIGITS = 12
# Seconds that git may take; it reads the time stamps of some thousand files.
_GIT_S = 20.0

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_DRIVER_VERSION = Path("/sys/module/nvidia/version")


def detect_environment(target: ResolvedTarget) -> Environment:
    """Return the environment of the device that would run code for `target` on this machine.

    A newer GPU runs a portable target, by its PTX. A machine that cannot run the target (no GPU, or another one) gets
    `device_name` "unknown": such an environment serves look-ups for compiling, and no measurement may be stamped with
    it.
    """
    if target.kind == "cuda":
        return _cuda_environment(target)
    import tvm
    import tvm_ffi
    from tvm.target import codegen

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
    from relaxtune.schedules.targets import PLANNED_FOR, PORTABLE

    # They say nothing about the code of a decision: names, TVM's own search keys, the host's half, whether PTX is kept
    # beside the code, and for which GPU decisions are proposed.
    left_out = {"kind", "tag", "keys", "host", "device", PORTABLE, PLANNED_FOR}
    attributes = {name: _plain(value) for name, value in target.target.attrs.items() if name not in left_out}
    return TargetKey(kind=target.kind, arch=target.arch, attributes=canonical_json(attributes))


def target_cores(target: ResolvedTarget) -> int | None:
    """Return the CPU cores a target's code may use, or None for a GPU."""
    return getattr(target.limits, "cores", None)


@cache
def code_version(root: Path | None = None) -> str:
    """Return the relaxtune that runs: its version, and from a git checkout the commit: `0.1.0+g1a6e40f0aaaa.dirty`.

    `root`: the folder that the package lies in; by default where it was imported from.
    `dirty` says that tracked files differ from the commit. An installed package knows its version alone.
    """
    place = root or Path(relaxtune.__file__).resolve().parent.parent
    if not (place / ".git").exists():
        return relaxtune.__version__
    # Not the repository that the environment or a parent folder of the caller names.
    git = ["git", f"--git-dir={place / '.git'}", f"--work-tree={place}"]
    describe = ["describe", "--always", "--dirty", f"--abbrev={_COMMIT_DIGITS}", "--match="]
    try:
        done = subprocess.run([*git, *describe], capture_output=True, text=True, check=True, timeout=_GIT_S)
    except (OSError, subprocess.SubprocessError) as e:
        logger.info("records name no commit of relaxtune: %s", getattr(e, "stderr", None) or e)
        return relaxtune.__version__
    return f"{relaxtune.__version__}+g{done.stdout.strip().replace('-', '.')}"


def user_here() -> str:
    """Return who runs this process, as user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


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
    import tvm
    import tvm_ffi

    from relaxtune.schedules.targets.capabilities import device_runs

    device = tvm.cuda(0)
    local = bool(device.exist) and device_runs(target.arch, str(device.compute_version), portable=target.portable)
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
