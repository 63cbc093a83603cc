"""Find what brought a wrong result in: first among the kernels, then among the passes, then in the import.

1. Every kernel of the artifact runs once, its outputs filled with NaN before; what it wrote is compared with the same
   PrimFunc without a schedule on the same arguments. Then all kernels are replaced by those references: if the results
   are right now, a kernel is to blame, the first that differed, or, where each alone is within tolerance, the one found
   by replacing them by halves.
2. Else the graph is run after a part of the passes, by halves: the first pass after which the results are wrong is to
   blame. If they are wrong before any pass, the import is.
3. The ONNX node is the first whose tensor is wrong, by comparing the wrong run with the last right one
   (`pipeline.bisect.matching`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bisect.matching import Divergence, TensorMatcher
from relaxtune.pipeline.bisect.plain_kernels import ReferenceKernels
from relaxtune.pipeline.bisect.result import Bisection, Culprit, FaultyKernel, FaultyPass
from relaxtune.pipeline.bisect.stages import StageRun, Stages
from relaxtune.pipeline.bisect.subject import Subject, make_subject
from relaxtune.pipeline.bisect.tensors import onnx_tensors
from relaxtune.pipeline.bisect.trace import CallSite, TracedCall
from relaxtune.pipeline.importer import ImportedGraph, import_model
from relaxtune.pipeline.precision.onnx_weights import with_quantised_weights
from relaxtune.pipeline.validate.array_comparison import SampleComparison, compare_arrays
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.tuning_db.urls import DatabasePlace

logger = logging.getLogger(__name__)


def bisect(
    module: Module,
    model: OnnxModel,
    inputs: Mapping[str, np.ndarray],
    tolerance: Tolerance,
    *,
    database: DatabasePlace | None = None,
) -> Bisection | None:
    """Return what makes a module's outputs wrong on an input, or None when they are right.

    The artifact is loaded, the model at its shapes; symbolic axes have the sizes of `inputs` throughout. `tolerance` is
    the allowed difference from ONNX Runtime. `database` has the artifact's records: only a module that runs as a CUDA
    graph needs it.
    Raises `PipelineError`: the model cannot be lowered again, or the artifact is not what this version makes of it.
    """
    return _Search(module, model, inputs, tolerance, database).run()


def check_kernels(
    module: Module, model: OnnxModel, inputs: Mapping[str, np.ndarray], *, database: DatabasePlace | None = None
) -> tuple[FaultyKernel, ...]:
    """Return the kernels of a module that differ from their unscheduled form on the arguments they get for an input.

    Finer than a comparison of outputs: a kernel that is slightly wrong may hide within what a deep model drifts.

    Arguments and errors are those of `bisect`.
    Raises `PipelineError`: as `bisect` raises.
    """
    subject = make_subject(module, model, database)
    faults, _, _ = _faulty_calls(subject, _references(subject), inputs)
    return _faulty_kernels(subject, faults)


class _Search:
    def __init__(
        self,
        module: Module,
        model: OnnxModel,
        inputs: Mapping[str, np.ndarray],
        tolerance: Tolerance,
        database: DatabasePlace | None,
    ) -> None:
        self._inputs = inputs
        self._tolerance = tolerance
        self._model = model
        self._tensors = onnx_tensors(model, inputs, module.manifest.policy)
        self._matcher = TensorMatcher(self._tensors, tolerance)
        self._subject: Subject = make_subject(module, model, database)
        self._tried: list[str] = []

    def run(self) -> Bisection | None:
        references = _references(self._subject)
        plain, _ = self._subject.run(self._inputs)
        faults, poisoned, trace = _faulty_calls(self._subject, references, self._inputs)
        outputs = plain if self._wrong(plain) else poisoned
        if not self._wrong(outputs):
            return None
        self._note(
            f"{len(trace)} kernels compared with their unscheduled form: "
            + (f"{len(faults)} differ, first {faults[0][0].function}" if faults else "none differs")
        )
        replaced, healthy = self._replaced(references, [call.function for call in self._subject.calls])
        if not self._wrong(replaced):
            self._note("all kernels replaced by their unscheduled form: results are right")
            return self._kernel_to_blame(references, faults, trace, outputs, healthy)
        self._note("all kernels replaced by their unscheduled form: results stay wrong")
        return self._pass_to_blame(faults)

    # Kernels

    def _replaced(
        self, references: ReferenceKernels, functions: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[TracedCall]]:
        first = {call.function: call for call in reversed(self._subject.calls)}
        replacements = {name: references.replacement(first[name]) for name in set(functions)}
        return self._subject.run(self._inputs, poison=True, replacements=replacements)

    def _kernel_to_blame(
        self,
        references: ReferenceKernels,
        faults: Sequence[tuple[CallSite, str]],
        trace: Sequence[TracedCall],
        outputs: Mapping[str, np.ndarray],
        healthy: Sequence[TracedCall],
    ) -> Bisection:
        functions = list(dict.fromkeys(call.function for call in self._subject.calls))
        if not faults:
            # Each is within tolerance alone: the first kernels that must be replaced together for right results.
            count = _first_true(
                lambda k: not self._wrong(self._replaced(references, functions[:k])[0]), 0, len(functions)
            )
            site = next(call for call in self._subject.calls if call.function == functions[count - 1])
            faults = [(site, "within tolerance by itself; results are right once it and those before are replaced")]
            self._note(f"kernels replaced by halves: right with the first {count} of {len(functions)} replaced")
        suspects = list(dict.fromkeys(call.function for call, _ in faults))
        blamed = suspects[0]
        for name in suspects:
            right = not self._wrong(self._replaced(references, [name])[0])
            self._note(f"only {name} replaced: results are {'right' if right else 'wrong'}")
            if right:
                blamed = name
                break
        faults = sorted(faults, key=lambda fault: fault[0].function != blamed)
        divergence = self._divergence(trace, outputs, self._matcher.learn(healthy))
        kernels = _faulty_kernels(self._subject, faults)
        return self._result(Culprit.KERNEL, divergence, kernels=kernels, nodes=kernels[0].onnx_nodes)

    # Passes

    def _pass_to_blame(self, faults: Sequence[tuple[CallSite, str]]) -> Bisection:
        lowered = self._subject.lowered
        stages = Stages(self._graph(), lowered.target, lowered.options, self._inputs)
        runs: dict[int, StageRun] = {}

        def wrong_after(count: int) -> bool:
            runs[count] = stages.run(stages.steps[:count])
            wrong = self._wrong(runs[count].outputs)
            after = (
                f"after pass {count} of {len(stages.steps)}, {stages.steps[count - 1].name}" if count else "as imported"
            )
            self._note(f"{after}: results are {'wrong' if wrong else 'right'}")
            return wrong

        kernels = _faulty_kernels(self._subject, faults)
        if wrong_after(0):
            known = self._matcher.guess(runs[0].trace)
            return self._result(
                Culprit.IMPORT, self._divergence(runs[0].trace, runs[0].outputs, known), kernels=kernels
            )
        # After the last pass they are what the replaced kernels gave, unless the memory plan or the weights are wrong.
        count = _first_true(wrong_after, 0, len(stages.steps))
        if count not in runs and not wrong_after(count):
            return self._result(Culprit.RUNTIME, None, kernels=kernels)
        step = stages.steps[count - 1]
        healed = None
        if not step.required:
            others = [other for other in stages.steps if other is not step]
            healed = not self._wrong(stages.run(others).outputs)
            self._note(f"all passes but {step.name}: results are {'right' if healed else 'wrong'}")
        before, after = runs[count - 1], runs[count]
        divergence = self._divergence(after.trace, after.outputs, self._matcher.learn(before.trace))
        blamed = FaultyPass(step.name, step.phase.value, not step.required, healed)
        return self._result(Culprit.PASS, divergence, lowering_pass=blamed, kernels=kernels)

    def _graph(self) -> ImportedGraph:
        """Return the imported graph; one whose weights are to be quantised with what they are quantised to.

        The reference computes with those, so results before the pass that quantises are to be the same.
        """
        policy = self._subject.module.manifest.policy
        model = with_quantised_weights(self._model, policy)
        return self._subject.lowered.graph if model is self._model else import_model(model)

    # Both

    def _divergence(
        self, trace: Sequence[TracedCall], outputs: Mapping[str, np.ndarray], known: Mapping[tuple[str, int], str]
    ) -> Divergence | None:
        wrong = frozenset(name for name in outputs if not self._comparison(name, outputs[name]).passed)
        return self._matcher.find_divergence(trace, outputs, known, wrong)

    def _wrong(self, outputs: Mapping[str, np.ndarray]) -> bool:
        return any(not self._comparison(name, array).passed for name, array in outputs.items())

    def _comparison(self, name: str, array: np.ndarray) -> SampleComparison:
        expected = self._tensors.values.get(name)
        if expected is None:
            return SampleComparison(0, False, "the model does not have this output")
        return compare_arrays(expected, array, self._tolerance)

    def _result(
        self,
        culprit: Culprit,
        divergence: Divergence | None,
        *,
        kernels: tuple[FaultyKernel, ...] = (),
        lowering_pass: FaultyPass | None = None,
        nodes: tuple[str, ...] = (),
    ) -> Bisection:
        first = divergence.nodes[0] if divergence and divergence.nodes else None
        if divergence is not None:
            nodes = tuple(node.label for node in divergence.nodes)
        return Bisection(
            model=self._model.name,
            culprit=culprit,
            node=first.label if first else next(iter(nodes), None),
            op_type=first.op_type if first else None,
            nodes=nodes,
            tensor=divergence.tensor if divergence else None,
            reason=divergence.comparison.reason if divergence else "",
            kernel=kernels[0] if culprit is Culprit.KERNEL else None,
            kernels=kernels,
            lowering_pass=lowering_pass,
            tried=tuple(self._tried),
        )

    def _note(self, text: str) -> None:
        logger.info("bisect %s: %s", self._model.name, text)
        self._tried.append(text)


def _references(subject: Subject) -> ReferenceKernels:
    return ReferenceKernels(subject.lowered.mod, subject.host, subject.calls)


def _faulty_calls(
    subject: Subject, references: ReferenceKernels, inputs: Mapping[str, np.ndarray]
) -> tuple[list[tuple[CallSite, str]], dict[str, np.ndarray], list[TracedCall]]:
    """Run an artifact with poisoned outputs; return its faulty calls and how they differ, its outputs and its trace."""
    faults: list[tuple[CallSite, str]] = []

    def check(call: CallSite, arguments: Sequence[object]) -> None:
        reason = references.find_fault(call, arguments)
        if reason is not None:
            faults.append((call, reason))

    outputs, trace = subject.run(inputs, poison=True, after=check)
    return faults, outputs, trace


def _faulty_kernels(subject: Subject, faults: Sequence[tuple[CallSite, str]]) -> tuple[FaultyKernel, ...]:
    """Return the kernels of some faults, each with its first."""
    found: dict[str, FaultyKernel] = {}
    for call, reason in faults:
        if call.function not in found:
            entry = subject.entry(call.function)
            stated = ("unknown", None, None) if entry is None else (entry.route, entry.record_id, entry.decision_sha256)
            found[call.function] = FaultyKernel(call.function, call.onnx_nodes, *stated, reason)
    return tuple(found.values())


def _first_true(test: Callable[[int], bool], low: int, high: int) -> int:
    """Return by halves the smallest number for which `test` holds, which is false for `low` and true for `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        if test(middle):
            high = middle
        else:
            low = middle
    return high
