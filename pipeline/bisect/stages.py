"""The graph as it is after some of the passes, run on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import backend, transform as relax_pass
from tvm.runtime import Tensor
from tvm.runtime.vm import VirtualMachine
from tvm_ffi import StructuralKey

from relaxtune.pipeline.bisect.plain_kernels import UNOPTIMISED_FLOPS_MAX, load_code, ready_for_host
from relaxtune.pipeline.bisect.trace import CallSite, KernelWatch, TracedCall, kernel_calls
from relaxtune.pipeline.codegen.token_list import listed_tokens
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.passes.order import Step, lowering_steps, plan_memory_passes


@dataclass(frozen=True)
class StageRun:
    """Results of a graph after some passes: its outputs by name, and what each call of a PrimFunc wrote."""

    outputs: Mapping[str, np.ndarray]
    trace: tuple[TracedCall, ...]


class Stages:
    """An imported graph on one input, to be run after any of its passes with unscheduled kernels.

    Operators that the passes have left are legalised by TVM's own passes, one kernel each. Large models take the
    default schedules: passes are looked at once kernels have been compared with unscheduled ones.
    Most passes leave a graph as it is; equal modules are compiled and run once.
    """

    def __init__(
        self,
        graph: ImportedGraph,
        target: tvm.target.Target,
        options: LoweringOptions,
        inputs: Mapping[str, np.ndarray],
    ) -> None:
        """Take the passes as they are listed, less those that are switched off."""
        self.steps = tuple(step for step in lowering_steps() if step.name not in options.disabled_passes)
        self._graph = graph
        self._target = target
        self._options = options
        self._inputs = inputs
        self._runs: dict[tuple[StructuralKey, tuple[CallSite, ...]], StageRun] = {}

    def run(self, steps: Sequence[Step]) -> StageRun:
        """Return what the graph computes after the given passes.

        Raises `LoweringError`: the module cannot be compiled at this point.
        """
        state = LoweringState(graph=self._graph, target=self._target, options=self._options)
        try:
            mod = self._apply(steps, state)
            calls = kernel_calls(mod, state.sources or self._graph.source_map)
            if state.weights or state.unpadding is not None:
                # Not all that is run is in the module.
                return self._computed(mod, calls, state)
            # A module's structure says nothing of names.
            key = (StructuralKey(mod), calls)
            if key not in self._runs:
                self._runs[key] = self._computed(mod, calls, state)
        except TVM_ERRORS as e:
            after = steps[-1].name if steps else "the import"
            raise LoweringError(f"{self._graph.name} after {after} cannot be compiled for the host: {e}") from e
        return self._runs[key]

    @property
    def _host(self) -> tvm.target.Target:
        return self._target.host if self._target.host is not None else self._target

    def _computed(self, mod: tvm.ir.IRModule, calls: tuple[CallSite, ...], state: LoweringState) -> StageRun:
        ready, target = ready_for_host(mod, self._host, calls, UNOPTIMISED_FLOPS_MAX)
        with tvm.transform.PassContext(opt_level=3), target:
            planned = tvm.transform.Sequential(plan_memory_passes(target, cuda_graph=False))(ready)
            machine = VirtualMachine(load_code(relax.build(planned, target, relax_pipeline=None)), tvm.cpu())
        watch = KernelWatch(calls)
        machine.set_instrument(watch)
        given = [self._inputs[spec.name] for spec in self._graph.inputs]
        if state.unpadding is not None:
            given += listed_tokens(state.unpadding, self._inputs[state.unpadding.mask])
        arguments = [tvm.runtime.tensor(np.asarray(array, order="C")) for array in (*given, *state.weights.values())]
        result = machine["main"](*arguments)
        watch.verify()
        fields = [result] if isinstance(result, Tensor) else list(result)
        outputs = {spec.name: field.numpy() for spec, field in zip(self._graph.outputs, fields, strict=True)}
        return StageRun(outputs, tuple(watch.trace))

    def _apply(self, steps: Sequence[Step], state: LoweringState) -> tvm.ir.IRModule:
        mod = self._graph.mod
        with self._target, tvm.transform.PassContext(opt_level=3):
            for step in steps:
                mod = step.run(mod, state)
        rest = [
            backend.DispatchSampling(), backend.DispatchSortScan(), relax_pass.LegalizeOps(), relax_pass.FuseTIR(),
        ]  # fmt: skip
        with self._host, tvm.transform.PassContext(opt_level=3):
            finished: tvm.ir.IRModule = tvm.transform.Sequential(rest)(mod)
        return finished
