"""Which device an artifact runs on, and whether this machine has what its code was made for."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Set
from pathlib import Path

import tvm
from tvm.runtime import Device
from tvm.target import codegen

from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.codegen.cuda_libraries import driver_release, load_cuda_runtime
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.targets.capabilities import native_arch, runs_on, translates_to

logger = logging.getLogger(__name__)


def device_for(manifest: Manifest, asked: str | None, directory: Path) -> Device:
    """Return the device that an artifact runs on.

    Parameters
    ----------
    manifest : Manifest
        Of the artifact.
    asked : str or None
        Such as `cuda:1`; by default the first device of the artifact's kind.
    directory : Path
        Where the artifact is, for messages.

    Raises
    ------
    ArtifactError
        The device is of another kind, not there, or not what the code was made for.
    """
    kind = "cuda" if manifest.target.kind == "cuda" else "cpu"
    text = asked or kind
    if not re.fullmatch(rf"{kind}(:\d+)?", text):
        raise ArtifactError(
            f"artifact {directory} is for {manifest.target.kind} ({manifest.target.arch}) and cannot run on device "
            f"{text!r}; expected {kind} or {kind}:N, or compile the model for that device"
        )
    _check_cpu(manifest, directory)
    if kind == "cpu":
        return tvm.cpu(0)
    return _cuda_device(manifest, int(text.partition(":")[2] or 0), directory)


def _cuda_device(manifest: Manifest, index: int, directory: Path) -> Device:
    found = load_cuda_runtime()
    device = tvm.cuda(index)
    if not device.exist:
        raise ArtifactError(
            f"artifact {directory} is for a GPU ({manifest.target.arch}), and this machine has no CUDA device {index} "
            f"({found or 'no driver answers'}); run it where there is one, or compile with --target llvm"
        )
    version = str(device.compute_version)
    if runs_on(manifest.target.arch, version):
        return device
    if manifest.target.ptx_cuda is not None and translates_to(manifest.target.arch, version):
        _check_driver(manifest.target.ptx_cuda, directory)
        logger.info("the driver translates the PTX of %s for %s", manifest.target.arch, device.device_name)
    else:
        raise ArtifactError(
            f"artifact {directory} is for {manifest.target.arch}; CUDA device {index} is {device.device_name} with "
            f"compute capability {device.compute_version}. Compile the model with --target cuda:{native_arch(version)}"
        )
    return device


def _check_driver(needed: str, directory: Path) -> None:
    """Check that the driver knows the release of CUDA that PTX was made by."""
    major, minor = (int(part) for part in needed.split("."))
    known = driver_release()
    if known is not None and known < (major, minor):
        raise ArtifactError(
            f"artifact {directory} has PTX of CUDA {needed} for newer GPUs, and the driver here translates PTX of "
            f"CUDA {known[0]}.{known[1]} at most; install a newer driver, or compile the model with that CUDA"
        )


def runs_here(target: ResolvedTarget) -> bool:
    """Whether this machine runs what is compiled for a target, so that it can be checked.

    A processor runs code for all that have no more instruction sets. What is to be measured needs the device itself.
    """
    if target.kind == "cuda":
        return detect_environment(target).device_name != UNKNOWN_DEVICE
    here = str(codegen.llvm_get_system_triple())
    machines = {triple.partition("-")[0] for triple in (here, str(target.target.attrs.get("mtriple", here)))}
    return len(machines) == 1 and not _missing(vector_features(target.target))


def _missing(needed: Set[str]) -> list[str]:
    """Return the instruction sets that this machine lacks."""
    return sorted(needed - vector_features(resolve_target("llvm").target)) if needed else []


def _check_cpu(manifest: Manifest, directory: Path) -> None:
    host = manifest.versions.get("machine", platform.machine())
    if host != platform.machine():
        raise ArtifactError(
            f"artifact {directory} is for {host} processors, this machine is {platform.machine()}; compile it here"
        )
    missing = _missing(set(manifest.target.cpu_features))
    if missing:
        raise ArtifactError(
            f"artifact {directory} was compiled for the processor {manifest.target.arch}; this machine's "
            f"({codegen.llvm_get_system_cpu()}) lacks {', '.join(missing)}. Compile the model here with --target llvm"
        )


def vector_features(target: tvm.target.Target) -> set[str]:
    """Return the instruction sets of an LLVM target that compiled code may use without asking."""
    # What LLVM emits by itself; tuning hints ("fast-...") and system instructions are no reason to refuse a machine.
    pattern = r"(sse|ssse|avx|fma|f16c|bmi|lzcnt|popcnt|movbe|amx|neon|sve|dotprod|fullfp16|i8mm|bf16).*"
    return {str(name) for name in codegen.llvm_get_cpu_features(target) if re.fullmatch(pattern, str(name))}
