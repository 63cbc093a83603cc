"""The outputs of each kernel of a running module, seen through the virtual machine's instrument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.runtime import Tensor
from tvm.runtime.vm import VMInstrumentReturnKind

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from relaxtune.pipeline.validate.validation import poison

# Replaces one call of a kernel: takes its arguments, outputs among them, and writes the outputs.
Replacement = Callable[..., None]


@dataclass(frozen=True)
class CallSite:
    """A call of a PrimFunc in `main`, in the order of execution: the variable it binds, its ONNX nodes, its outputs."""

    binding: str
    function: str
    onnx_nodes: tuple[str, ...]
    outputs: int


@dataclass(frozen=True)
class TracedCall:
    """A call that was executed, and what it wrote."""

    call: CallSite
    arrays: tuple[np.ndarray, ...]


def kernel_calls(mod: tvm.ir.IRModule, sources: Mapping[str, tuple[str, ...]]) -> tuple[CallSite, ...]:
    """Return the calls of PrimFuncs that `main` makes; `sources` is binding name -> ONNX nodes."""
    calls = []
    for binding in bindings_of(main_of(mod)):
        callee = called_function(binding.value)
        if callee is not None:
            count = len(binding.var.ty.fields) if isinstance(binding.var.ty, relax.TupleType) else 1
            name = binding.var.name
            calls.append(CallSite(name, str(callee.name_hint), sources.get(name, ()), count))
    return tuple(calls)


class KernelWatch:
    """An instrument that keeps what kernels write, fills their outputs with NaN before, or puts others in their place.

    A trace is for one run. Kernels that write only part of their output show as NaN, whatever was in memory before.
    """

    def __init__(
        self,
        calls: Sequence[CallSite],
        *,
        poison: bool = False,
        replacements: Mapping[str, Replacement] | None = None,
        after: Callable[[CallSite, Sequence[object]], None] | None = None,
    ) -> None:
        self._calls = calls
        self._names = {call.function for call in calls}
        self._poison = poison
        self._replacements = replacements or {}
        self._after = after
        self._next = 0
        self._mismatch: tuple[int, str] | None = None
        self.trace: list[TracedCall] = []

    def __call__(self, _function: object, name: str, before: bool, _result: object, *arguments: object) -> int:
        """Take part in a call of the machine (`VirtualMachine.set_instrument`)."""
        if name not in self._names:
            return int(VMInstrumentReturnKind.NO_OP)
        call = self._calls[self._next] if self._next < len(self._calls) else None
        if call is None or call.function != name:
            # Raised by `verify`: an error would lose its type on the way through the machine.
            self._mismatch = self._mismatch or (self._next, name)
            return int(VMInstrumentReturnKind.NO_OP)
        if before:
            if self._poison:
                for tensor in output_tensors(call, arguments):
                    poison(tensor)
            replacement = self._replacements.get(name)
            if replacement is None:
                return int(VMInstrumentReturnKind.NO_OP)
            replacement(*arguments)
        self._next += 1
        self.trace.append(TracedCall(call, tuple(tensor.numpy() for tensor in output_tensors(call, arguments))))
        if self._after is not None:
            self._after(call, arguments)
        return int(VMInstrumentReturnKind.SKIP_RUN if before else VMInstrumentReturnKind.NO_OP)

    def verify(self) -> None:
        """Raise `PipelineError` if a run did not call the expected kernels."""
        if self._mismatch is None and self._next == len(self._calls):
            return
        place, got = self._mismatch or (self._next, None)
        expected = f"kernel {self._calls[place].function!r}" if place < len(self._calls) else "no further kernel"
        raise PipelineError(
            f"call {place} of the module runs {'no kernel' if got is None else f'kernel {got!r}'} where the passes, "
            f"run again, say {expected}: the artifact is not what this version makes of the model; compile it again "
            "and validate that"
        )


def output_tensors(call: CallSite, arguments: Sequence[object]) -> list[Tensor]:
    """Return the tensors a kernel writes: the last of its arguments that are tensors."""
    return [argument for argument in arguments if isinstance(argument, Tensor)][-call.outputs :]
