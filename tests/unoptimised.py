"""A target of this CPU for tests of what kernels compute, not of how fast: LLVM takes a sixth of the time."""

from __future__ import annotations

from tvm.target import Target

from relaxtune.schedules.targets import resolve_target

LLVM = resolve_target("llvm").target


def unoptimised(target: Target) -> Target:
    """Return an LLVM target whose code LLVM does not optimise."""
    settings = {name: value for name, value in target.export().items() if name not in ("tag", "keys", "host")}
    settings["opt-level"] = 0
    return Target({**settings, "host": settings})


UNOPTIMISED = unoptimised(LLVM)
