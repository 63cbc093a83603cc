"""Faults, planted: a pass that does one thing more than it should, or a kernel that is not what was asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower, lowering_steps
from relaxtune.pipeline.passes.kit.ir import array_of, bindings_of, main_of, with_main
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.order import Step
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route

Edit = Callable[[tvm.ir.Expr], tvm.ir.Expr]


@mutator
class _EditBinding(PyExprMutator):  # type: ignore[misc]
    """Replaces the value of one binding."""

    def __init__(self, name: str, edit: Edit) -> None:
        super().__init__()
        self._name = name
        self._edit = edit
        self.done = False

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var.name != self._name:
            super().visit_var_binding_(binding)
            return
        self.done = True
        value = self.builder_.normalize(self._edit(self.visit_expr(binding.value)))
        new = type(binding.var)(binding.var.name, value.ty)
        self.builder_.emit_normalized(relax.VarBinding(new, value))
        self.set_var_remap(binding.var, new)


@dataclass(frozen=True)
class FaultyPass:
    """A fault in a pass: after `name` has run, the binding `binding` of `main` is what `edit` makes of its value."""

    name: str
    binding: str
    edit: Edit

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Have the list of passes hold the faulty one, for the lowering and for the bisection."""
        steps = lowering_steps()
        assert self.name in {step.name for step in steps}
        faulty = tuple(replace(step, run=self._run(step)) if step.name == self.name else step for step in steps)
        for place in ("relaxtune.pipeline.passes.lower", "relaxtune.pipeline.bisect.stages"):
            patch.setattr(importlib.import_module(place), "lowering_steps", lambda: faulty)

    def _run(self, step: Step) -> Callable[[tvm.ir.IRModule, LoweringState], tvm.ir.IRModule]:
        def run(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
            made = step.run(mod, state)
            # In a part cut out of the graph its last node is bound to the result's name.
            names = {binding.var.name for binding in bindings_of(main_of(made))}
            editor = _EditBinding(self.binding if self.binding in names else "n_gv", self.edit)
            function = editor.visit_expr(main_of(made))
            assert editor.done, f"no binding {self.binding} after {self.name}: {main_of(made).script()}"
            return with_main(made, function)

        return run


@dataclass(frozen=True)
class FaultyKernel:
    """A fault in a kernel: in the text of the PrimFunc that computes `binding`, `old` is replaced by `new`.

    `record` makes it a record's kernel, as one whose decision has become stale would be.
    """

    binding: str
    changes: Sequence[tuple[str, str]]
    record: int | None = None

    def plant(self, choices: Sequence[KernelChoice], mod: tvm.ir.IRModule, function: str, target: ResolvedTarget):
        """Return the choices with the wrong kernel among them."""
        # Without the regions that blocks state, which are inferred anew.
        lines = mod[function].script().splitlines()
        text = "\n".join(line for line in lines if "T.reads(" not in line and "T.writes(" not in line)
        for old, new in self.changes:
            assert old in text, f"{old!r} is not in\n{text}"
            text = text.replace(old, new)
        wrong = tvm.script.from_source(text)
        attributes = mod[function].attrs
        for name in attributes.keys() if attributes else ():
            wrong = wrong.with_attr(name, attributes[name])
        scheduled = apply_fallback(tvm.IRModule({"main": wrong}), target.target)["main"]
        assert isinstance(scheduled, tirx.PrimFunc)
        made = scheduled.without_attr("global_symbol").with_attr(SCHEDULED_ATTR, True)
        route = Route.FALLBACK if self.record is None else Route.METASCHEDULE
        return [
            replace(choice, scheduled=made, record_id=self.record, route=route)
            if choice.function == function
            else choice
            for choice in choices
        ]


def build(
    model: OnnxModel,
    target: ResolvedTarget,
    folder: Path,
    *kernels: FaultyKernel,
    options: LoweringOptions | None = None,
) -> Module:
    """Return the model compiled, with the faulty kernels given; a faulty pass is planted before."""
    lowered = lower(import_model(model), target.target, options)
    choices = select_kernels(
        lowered,
        extract_tasks([lowered]),
        database=None,
        target=target,
        environment=detect_environment(target),
    )
    for kernel in kernels:
        function = function_of(lowered.kernels, kernel.binding)
        choices = kernel.plant(choices, lowered.mod, function, target)
    write_artifact(compile_module(lowered, choices, target), folder / "artifact")
    return Module.load(folder / "artifact")


def function_of(kernels, binding: str) -> str:
    """Return the kernel that computes a binding."""
    found = [name for name, calls in kernels.items() if any(call.binding == binding for call in calls)]
    assert found, f"no kernel binds {binding}: {[call.binding for calls in kernels.values() for call in calls]}"
    return found[0]


def constant(array: np.ndarray) -> tvm.ir.Expr:
    """Return a tensor constant."""
    return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array)))


def with_argument(value: tvm.ir.Expr, index: int, edit: Callable[[tvm.ir.Expr], tvm.ir.Expr]) -> tvm.ir.Expr:
    """Return a call with one argument edited."""
    arguments = [edit(argument) if i == index else argument for i, argument in enumerate(value.args)]
    return relax.Call(value.op, arguments, value.attrs, value.ty_args)


def edited_constant(index: int, edit: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Return an edit of a call's constant argument."""
    return lambda value: with_argument(value, index, lambda argument: constant(edit(array_of(argument))))
