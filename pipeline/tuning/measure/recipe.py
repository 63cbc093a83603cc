"""The input of a builder: a scheduled module, or the recipe of one.

A template takes 30 to 150 ms to make a kernel, and a kernel takes as long to pickle. A recipe is small, and the process
that compiles the kernel makes it: the thread that tunes hands in ten times as many candidates a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import tvm

from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.schedules.registry import apply_decision
from relaxtune.schedules.targets import ResolvedTarget


@dataclass(frozen=True)
class Recipe:
    """A kernel that a template or a library makes of a function."""

    mod: PackedModule  # The module with the unscheduled function as `main`; all candidates of a task share the bytes.
    target: ResolvedTarget  # The target of the kernel.
    decision: str  # The parameters, as they are recorded.

    def make(self) -> tvm.ir.IRModule:
        """Return the module with the kernel as `main`.

        Raises `TemplateError`: the template does not make it after all.
        """
        return tvm.IRModule({"main": apply_decision(self.mod.make()["main"], self.target, self.decision)})


Buildable: TypeAlias = tvm.ir.IRModule | Recipe | PackedModule


def scheduled(what: Buildable) -> tvm.ir.IRModule:
    """Return the scheduled module that is to be built; for errors see `Recipe.make`."""
    return what.make() if isinstance(what, Recipe | PackedModule) else what
