"""`lower`: run the list of passes over an imported graph, and report what each did."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import tvm
from tvm_ffi import structural_equal

import relaxtune.pipeline.passes.kit.tvm_errors  # noqa: F401  TVM hands on interrupts
from relaxtune.pipeline.errors import LoweringError, UsageError
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.importer.ordered_sizes import order_sizes
from relaxtune.pipeline.passes.graph_decisions import DECIDED_PASSES
from relaxtune.pipeline.passes.kit.ir import HALVES, binding_count, bindings_of, constants_in, dtype_of, main_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.module import LoweredModule, LoweringOptions, PassReport
from relaxtune.pipeline.passes.onnx_nodes_of_kernels import collect_kernels
from relaxtune.pipeline.passes.order import Step, lowering_steps

_LOG = logging.getLogger(__name__)

# Whether an optional pass that fails ends the lowering. The tests set it: a bug in a pass must not hide in them.
END_AT_FAILED_PASS = False


def lower(graph: ImportedGraph, target: tvm.target.Target, options: LoweringOptions | None = None) -> LoweredModule:
    """Return the graph as calls of fused, unscheduled PrimFuncs.

    Raises `UsageError`: an unknown precision or pass name, a pass that must not be switched off, or padding that cannot
    be left out.
    Raises `LoweringError`: a pass failed that the graph, or the precision asked for, cannot do without; the message
    names it. Any other pass that fails is logged and left out; where a needed pass fails, all optional ones are, before
    this is raised.
    Raises `MemoryError`: the memory is full: without a pass, the compile would need no less.
    """
    order_sizes()
    options = options or LoweringOptions()
    steps = lowering_steps()
    _check(options, steps, graph)
    helpful = {step.name for step in steps if not step.required and not step.makes_precision} - options.disabled_passes
    try:
        return _lower(graph, target, options, steps)
    except LoweringError as e:
        if END_AT_FAILED_PASS or not helpful:
            raise
        plain = replace(options, disabled_passes=options.disabled_passes | helpful)
        try:
            lowered = _lower(graph, target, plain, steps)
        except LoweringError:
            raise e from e.__cause__
        _LOG.warning(
            "%s. An optional pass made code that it cannot process; compiling goes on without optional passes, and "
            "kernels are slower", e,
        )  # fmt: skip
        return lowered


def _lower(
    graph: ImportedGraph, target: tvm.target.Target, options: LoweringOptions, steps: tuple[Step, ...]
) -> LoweredModule:
    state = LoweringState(graph=graph, target=target, options=options)
    mod = graph.mod
    reports: list[PassReport] = []
    with target, tvm.transform.PassContext(opt_level=3):
        for index, step in enumerate(steps):
            mod, report = _run(step, mod, state)
            reports.append(report)
            last_of_phase = index + 1 == len(steps) or steps[index + 1].phase != step.phase
            if options.dump_dir is not None and last_of_phase:
                number, _, name = step.phase.partition(" ")
                options.dump_dir.mkdir(parents=True, exist_ok=True)
                path = options.dump_dir / f"{int(number):02d}-{name.replace(' ', '-')}.py"
                path.write_text(mod.script(show_meta=False) + "\n", encoding="utf-8")
    kernels = collect_kernels(mod, state)
    _LOG.info(
        "%s: %d kernel calls, %d kernels, %d weights",
        graph.name, sum(map(len, kernels.values())), len(kernels), len(state.weights),
    )  # fmt: skip
    return LoweredModule(
        graph=graph,
        mod=mod,
        target=target,
        options=options,
        weights=dict(state.weights),
        kernels=kernels,
        reports=tuple(reports),
        quantised_nodes=tuple(sorted(state.quantised_nodes)),
        float_nodes=tuple(sorted(state.float_nodes)),
        float_reasons=dict(sorted(state.float_reasons.items())),
        rows_to_bytes=state.rows_to_bytes,
        static=state.static_scales(),
        unpadding=state.unpadding,
    )


def _check(options: LoweringOptions, steps: tuple[Step, ...], graph: ImportedGraph) -> None:
    _check_precision(options, graph)
    required = {step.name: step.required for step in steps}
    unknown = sorted(options.disabled_passes - required.keys())
    if unknown:
        optional = ", ".join(name for name, reason in required.items() if not reason)
        raise UsageError(
            f"no pass is called {', '.join(map(repr, unknown))}; the passes that can be switched off are: {optional}"
        )
    for name in sorted(options.disabled_passes):
        if required[name]:
            raise UsageError(f"pass {name!r} cannot be switched off: {required[name]}")


def _check_precision(options: LoweringOptions, graph: ImportedGraph) -> None:
    """Refuse a name that would have no effect: half precision made wider."""
    policy = options.policy
    if policy is None or policy.half is not None or policy.integer:
        return
    constants = (one for binding in bindings_of(main_of(graph.mod)) for one in constants_in(binding.value))
    halves = sorted({dtype_of(one) for one in constants} & set(HALVES))
    if halves:
        raise UsageError(
            f"precision {policy.name!r} of model {graph.name!r}: its weights are {' and '.join(halves)}, and widening "
            "does not make them more exact; leave the precision out, or compile the float32 original"
        )


def _run(step: Step, mod: tvm.ir.IRModule, state: LoweringState) -> tuple[tvm.ir.IRModule, PassReport]:
    if step.name in state.options.disabled_passes:
        return mod, PassReport(step.phase, step.name, False, 0.0, 0, 0)
    state.notes.clear()
    state.constants_folded = 0
    before, known, failure = binding_count(mod), state.saved(), ""
    start = time.perf_counter()
    try:
        result = step.run(mod, state)
    except (UsageError, LoweringError, MemoryError):
        raise
    except Exception as e:  # TVM's error classes share no base of their own
        lines = str(e).strip().splitlines()
        failure = f"{type(e).__name__}: {lines[-1] if lines else 'no message'}"
        needed = step.required
        if step.makes_precision:
            needed = f"without it the model has not the precision {state.options.precision!r}"
        message = f"pass {step.name!r} ({step.phase}) failed on model {state.graph.name!r}: {failure}"
        if needed or END_AT_FAILED_PASS:
            raise LoweringError(f"{message}; {needed or 'the compile would go on without it'}; report the model") from e
        _LOG.warning(
            "%s; compiling goes on without it. Results stay right; kernels may be slower. Report the model", message
        )
        _LOG.debug("pass %s", step.name, exc_info=True)
        result = mod
        state.restore(known)
        state.note(f"failed: {failure}")
    seconds = time.perf_counter() - start
    removed = before - binding_count(result)
    notes = tuple(state.notes)
    changed = step.name not in DECIDED_PASSES or not structural_equal(result, mod)
    report = PassReport(
        step.phase, step.name, not failure, seconds, removed, state.constants_folded, notes, failure, changed
    )
    _LOG.debug("%s: %.3f s, %d bindings removed, %d folded", step.name, seconds, removed, state.constants_folded)
    return result, report
