"""A target of this CPU for tests of what kernels compute, not of how fast: LLVM takes a sixth of the time."""

from __future__ import annotations

import json
from dataclasses import replace

import tvm
from tvm import relax
from tvm.target import Target

from relaxtune.pipeline.bisect.plain_kernels import load_code
from relaxtune.schedules.targets import ResolvedTarget, resolve_target

HOST = resolve_target("llvm")
LLVM = HOST.target


def unoptimised(target: Target) -> Target:
    """Return an LLVM target whose code LLVM does not optimise."""
    settings = _settings(target)
    return Target({**settings, "host": settings})


def _settings(target: Target) -> dict[str, object]:
    kept = {name: value for name, value in json.loads(str(target)).items() if name not in ("tag", "keys", "host")}
    return {**kept, "opt-level": 0}


UNOPTIMISED = unoptimised(LLVM)
UNOPTIMISED_HOST: ResolvedTarget = replace(HOST, target=UNOPTIMISED)
# As `--target` takes it.
UNOPTIMISED_TEXT = json.dumps(_settings(LLVM))


def runnable(executable: tvm.runtime.Executable) -> relax.VirtualMachine:
    """Return what runs an executable of this CPU; compiling a whole model in memory takes three times as long."""
    return relax.VirtualMachine(load_code(executable), tvm.cpu())
