"""The device that an artifact runs on, and whether this machine can run its code."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Set
from pathlib import Path

from tvm_ffi import Device

from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.codegen.cuda_libraries import driver_release, load_cuda_runtime
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.tvm_runtime.library import compute_version, cpu, cuda, device_exists, device_name
from relaxtune.schedules.targets.capabilities import native_arch, runs_on, translates_to
from relaxtune.schedules.targets.host import cpu_features, plain_feature

logger = logging.getLogger(__name__)


def device_for(manifest: Manifest, requested: str | None, directory: Path) -> Device:
    """Return the device that an artifact runs on: the one asked for, such as `cuda:1`, or the first of its kind.

    Raises `ArtifactError`: the device is of another kind, not there, or not what the code was made for.
    """
    kind = "cuda" if manifest.target.kind == "cuda" else "cpu"
    text = requested or kind
    if not re.fullmatch(rf"{kind}(:\d+)?", text):
        raise ArtifactError(
            f"artifact {directory} is for {manifest.target.kind} ({manifest.target.arch}) and cannot run on device "
            f"{text!r}; expected {kind} or {kind}:N, or compile the model for that device"
        )
    host = manifest.versions.get("machine", platform.machine())
    if host != platform.machine():
        raise ArtifactError(
            f"artifact {directory} is for {host} processors, this machine is {platform.machine()}; compile it here"
        )
    missing = missing_features(set(manifest.target.cpu_features))
    if missing:
        raise ArtifactError(
            f"artifact {directory} was compiled for the processor {manifest.target.arch}; this machine's "
            f"lacks {', '.join(missing)}. Compile the model here with --target llvm"
        )
    if kind == "cpu":
        return cpu()
    return _cuda_device(manifest, int(text.partition(":")[2] or 0), directory)


def _cuda_device(manifest: Manifest, index: int, directory: Path) -> Device:
    found = load_cuda_runtime()
    device = cuda(index)
    if not device_exists(device):
        raise ArtifactError(
            f"artifact {directory} is for a GPU ({manifest.target.arch}), and this machine has no CUDA device {index} "
            f"({found or 'no driver answers'}); run it where there is one, or compile with --target llvm"
        )
    version = compute_version(device)
    if runs_on(manifest.target.arch, version):
        return device
    if manifest.target.ptx_cuda is not None and translates_to(manifest.target.arch, version):
        needed, known = manifest.target.ptx_cuda, driver_release()
        if known is not None and known < tuple(int(part) for part in needed.split(".")):
            raise ArtifactError(
                f"artifact {directory} has PTX of CUDA {needed} for newer GPUs, and the driver here translates PTX of "
                f"CUDA {known[0]}.{known[1]} at most; install a newer driver, or compile the model with that CUDA"
            )
        logger.info("the driver translates the PTX of %s for %s", manifest.target.arch, device_name(device))
    else:
        raise ArtifactError(
            f"artifact {directory} is for {manifest.target.arch}; CUDA device {index} is {device_name(device)} with "
            f"compute capability {version}. Compile the model with --target cuda:{native_arch(version)}"
        )
    return device


def missing_features(needed: Set[str]) -> list[str]:
    """Return the instruction sets, by LLVM's names, that this machine lacks."""
    flags = cpu_features()
    if flags is not None:
        return sorted(name for name in needed if plain_feature(name) not in flags)
    from relaxtune.schedules.targets.resolve import resolve_target, vector_features

    return sorted(needed - vector_features(resolve_target("llvm").target)) if needed else []
