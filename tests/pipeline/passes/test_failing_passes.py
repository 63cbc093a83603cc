"""Lowering where a pass fails, is interrupted or has no memory."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import numpy as np
import pytest
import tvm

from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes import LoweringOptions, lower, lowering_steps
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.order import Phase, Step
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.lowered_zoo import FP32_TOLERANCE, graph_of_zoo, lowered_of, model_of, report_of, run_lowered
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, feeds_of


def _fail(_mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    state.sources.clear()
    raise ValueError("shapes of operands differ")


def _with_failing(monkeypatch: pytest.MonkeyPatch, step: Step, *, strict: bool) -> None:
    # The package's function `lower` hides its module of the same name.
    module = sys.modules["relaxtune.pipeline.passes.lower"]
    steps = [one for one in lowering_steps() if one.name != step.name]
    place = next(place for place, one in enumerate(steps) if one.phase == Phase.LEGALISE)
    monkeypatch.setattr(module, "lowering_steps", lambda: (*steps[:place], step, *steps[place:]))
    monkeypatch.setattr(module, "END_AT_FAILED_PASS", strict)


def test_lower_goes_on_without_a_pass_that_fails_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = lowered_of("t5-tiny").kernels
    _with_failing(monkeypatch, Step(Phase.PATTERNS, "failing_pass", _fail), strict=False)
    feeds = feeds_of(model_of("t5-tiny"))
    lowered = lower(graph_of_zoo("t5-tiny"), LLVM)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model_of("t5-tiny"), feeds), FP32_TOLERANCE)
    assert lowered.kernels == kernels
    report = report_of(lowered, "failing_pass")
    assert (report.enabled, report.failure) == (False, "ValueError: shapes of operands differ")
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    expected = (
        "pass 'failing_pass' (4 pattern rewrites) failed on model 't5-tiny': ValueError: shapes of operands differ"
    )
    assert warning.startswith(expected)


@pytest.mark.parametrize(
    ("step", "strict", "reason"),
    [
        (Step(Phase.PATTERNS, "failing_pass", _fail), True, "would go on without it"),
        (Step(Phase.PATTERNS, "failing_pass", _fail, "the code generator needs it"), False, "the code generator needs"),
        (Step(Phase.PATTERNS, "quantise_weights", _fail, makes_precision=True), False, "precision 'w8a16'"),
    ],
)
def test_lower_ends_when_a_pass_fails_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, step: Step, strict: bool, reason: str
) -> None:
    _with_failing(monkeypatch, step, strict=strict)
    with pytest.raises(LoweringError, match=f"pass '{step.name}'.*shapes of operands differ; .*{reason}"):
        lower(graph_of_zoo("t5-tiny"), LLVM, LoweringOptions(precision="w8a16"))


def test_lower_goes_on_without_optional_passes_when_one_makes_what_a_needed_pass_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
        state.sources.clear()
        return mod

    def refuse(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
        if not state.sources:
            raise ValueError("no sources")
        return mod

    _with_failing(monkeypatch, Step(Phase.PATTERNS, "spoiling_pass", spoil), strict=False)
    module = sys.modules["relaxtune.pipeline.passes.lower"]
    steps = [*module.lowering_steps()]
    place = next(place for place, one in enumerate(steps) if one.name == "spoiling_pass") + 1
    needed = Step(Phase.LEGALISE, "needed_pass", refuse, "nothing runs without it")
    monkeypatch.setattr(module, "lowering_steps", lambda: (*steps[:place], needed, *steps[place:]))
    feeds = feeds_of(model_of("t5-tiny"))
    lowered = lower(graph_of_zoo("t5-tiny"), LLVM)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model_of("t5-tiny"), feeds), FP32_TOLERANCE)
    kept = {one.name for one in steps if one.required or one.makes_precision} | {"needed_pass"}
    assert {report.name for report in lowered.reports if report.enabled} == kept
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "pass 'needed_pass'" in warning
    monkeypatch.setattr(module, "END_AT_FAILED_PASS", True)
    with pytest.raises(LoweringError, match="needed_pass"):
        lower(graph_of_zoo("t5-tiny"), LLVM)


@pytest.mark.parametrize("code", [0, 3, None, "why"])
def test_an_exit_inside_a_pass_that_tvm_calls_is_no_failure_of_the_pass(
    monkeypatch: pytest.MonkeyPatch, code: object
) -> None:
    _with_failing(monkeypatch, _called_by_tvm(lambda: sys.exit(code)), strict=False)
    with pytest.raises(SystemExit) as ended:
        lower(graph_of_zoo("t5-tiny"), LLVM)
    assert ended.value.code == code


def test_an_interrupt_inside_a_pass_that_tvm_calls_is_no_failure_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    step = _called_by_tvm(lambda: signal.raise_signal(signal.SIGINT))
    _with_failing(monkeypatch, step, strict=False)
    with pytest.raises(KeyboardInterrupt):
        lower(graph_of_zoo("t5-tiny"), LLVM)


def _memory_is_full() -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    "allocate",
    [_memory_is_full, lambda: np.empty(1 << 48), lambda: tvm.runtime.empty((1 << 48,), "float32")],
    ids=["python", "numpy", "tvm"],
)
@pytest.mark.parametrize("by_tvm", [True, False], ids=["called by tvm", "called"])
def test_a_pass_without_memory_ends_the_lowering(
    monkeypatch: pytest.MonkeyPatch, allocate: Callable[[], object], by_tvm: bool
) -> None:
    plain = Step(Phase.PATTERNS, "large_pass", lambda _mod, _state: allocate())  # type: ignore[arg-type, return-value]
    _with_failing(monkeypatch, _called_by_tvm(allocate) if by_tvm else plain, strict=False)
    with pytest.raises(MemoryError):
        lower(graph_of_zoo("t5-tiny"), LLVM)


def _called_by_tvm(end: Callable[[], object]) -> Step:
    """Return a step in whose pass something else ends the process."""

    def interrupted(mod: tvm.ir.IRModule, _: LoweringState) -> tvm.ir.IRModule:
        @tvm.transform.module_pass(opt_level=0)
        def in_tvm(_mod: tvm.ir.IRModule, _context: tvm.transform.PassContext) -> tvm.ir.IRModule:
            end()
            raise AssertionError("this is raised before")

        return in_tvm(mod)

    return Step(Phase.PATTERNS, "interrupted_pass", interrupted)
