"""The base of the templates for rows and for elementwise functions: both read a function as a `Dataflow`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import lru_cache

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import KernelTemplate, Own, refuse_target
from relaxtune.schedules.templates.emit.accesses import Accesses
from relaxtune.schedules.tir.dataflow import Dataflow, recognise_dataflow


class DataflowTemplate(KernelTemplate[Dataflow, Own]):
    """A template of functions that are read as a `Dataflow`, of known sizes or of a symbolic number of rows."""

    @staticmethod
    @abstractmethod
    def refuse(func: tirx.PrimFunc, flow: Dataflow) -> Refusal | None:
        """Return why the template cannot make what a function computes."""

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> Dataflow | Refusal:
        refusal, flow = refuse_target(target), recognise_dataflow(func)
        return refusal or (flow if isinstance(flow, Refusal) else self.refuse(func, flow) or flow)

    def _recognise_rows(self, func: tirx.PrimFunc, target: ResolvedTarget, rows: int) -> Dataflow | Refusal:
        found = refuse_target(target) or _recognise_any(self, func)
        return found if isinstance(found, Refusal) else replace(found, planned=rows)


@lru_cache(maxsize=8)
def _recognise_any(template: DataflowTemplate[Own], func: tirx.PrimFunc) -> Dataflow | Refusal:
    """Return what a function of a symbolic number of rows computes; many of those are asked for, one after another."""
    flow = recognise_dataflow(func, symbolic=True)
    return flow if isinstance(flow, Refusal) else template.refuse(func, flow) or flow


@lru_cache(maxsize=16)
def _accesses_of_any(func: tirx.PrimFunc, lanes: int) -> Accesses | None:
    flow = recognise_dataflow(func, symbolic=True)
    return None if isinstance(flow, Refusal) else Accesses(flow, lanes)


def accesses_of(func: tirx.PrimFunc, flow: Dataflow, lanes: int) -> Accesses:
    """Return the accesses of a function, to count them."""
    known = _accesses_of_any(func, lanes) if flow.planned else None
    return known or Accesses(flow, lanes)
