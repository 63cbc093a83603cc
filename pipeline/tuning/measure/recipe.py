"""What a builder is given: a scheduled module, or the recipe of one.

A template takes 30 to 150 ms to make a kernel, and a kernel takes as long to pickle. A recipe is small, and the process
that compiles the kernel makes it: the thread that tunes hands in ten times as many candidates a second.
"""

from __future__ import annotations

import pickle
import zlib
from dataclasses import dataclass
from typing import TypeAlias

import tvm

from relaxtune.schedules.registry import apply_decision
from relaxtune.schedules.targets import ResolvedTarget


@dataclass(frozen=True)
class Recipe:
    """A kernel that a template or a library makes of a function.

    Attributes
    ----------
    mod
        The module with the unscheduled function as `main`, pickled and compressed.
    target
        What the kernel is made for.
    decision
        The parameters, as they are recorded.
    """

    mod: bytes
    target: ResolvedTarget
    decision: str

    def make(self) -> tvm.ir.IRModule:
        """Return the module with the kernel as `main`.

        Raises
        ------
        TemplateError
            The template does not make it after all.
        """
        return tvm.IRModule(
            {"main": apply_decision(pickle.loads(zlib.decompress(self.mod))["main"], self.target, self.decision)}
        )


@dataclass(frozen=True)
class Pickled:
    """A scheduled module in the form in which it is sent and kept; compressed, a driver holds thousands of them."""

    mod: bytes

    @classmethod
    def of(cls, mod: tvm.ir.IRModule) -> Pickled:
        """Return a module's."""
        return cls(zlib.compress(pickle.dumps(mod), 1))

    def make(self) -> tvm.ir.IRModule:
        """Return the module."""
        mod: tvm.ir.IRModule = pickle.loads(zlib.decompress(self.mod))
        return mod


Buildable: TypeAlias = tvm.ir.IRModule | Recipe | Pickled


def scheduled(what: Buildable) -> tvm.ir.IRModule:
    """Return the scheduled module that is to be built.

    Raises
    ------
    TemplateError
        See `Recipe.make`.
    """
    return what.make() if isinstance(what, Recipe | Pickled) else what
