"""The CUDA graph of a module whose sizes are all known, which the virtual machine captures in the first call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tvm_ffi import Device, Tensor

from relaxtune.models.spec import TensorSpec
from relaxtune.pipeline.artifact.gpu.size_graphs import noted_allocations
from relaxtune.pipeline.artifact.gpu.turns import Turns, uncollected
from relaxtune.pipeline.artifact.loading import as_tuple
from relaxtune.pipeline.tvm_runtime.library import VirtualMachine, empty


def input_buffers(inputs: Sequence[TensorSpec], device: Device, turns: Turns) -> tuple[Tensor, ...]:
    """Return tensors for inputs of static shapes."""
    with turns.alone:
        return tuple(empty([int(size) for size in spec.shape], spec.dtype, device) for spec in inputs)


class StaticGraph:
    """Runs calls of a function, `entry`, as one graph, which reads its inputs in `buffers`, then the weights.

    All inputs are of static shapes, and all calls inside a turn of the module.
    """

    def __init__(
        self, machine: VirtualMachine, entry: str, buffers: Sequence[Tensor], weights: Sequence[Tensor], turns: Turns
    ) -> None:
        self.buffers = tuple(buffers)
        self._machine, self._turns = machine, turns
        # Saved with its arguments, so that a run does not hand over every weight again.
        saved = f"relaxtune_saved_{entry}"
        machine.save_function(entry, saved, *self.buffers, *weights)
        self._saved = machine[saved]
        self._captured = False
        # Whether a call takes memory of the pool, which the second one tells.
        self._takes_memory: bool | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of one call; tensors that are not the buffers themselves are copied there."""
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            if tensor is not buffer:
                self._turns.copy(tensor, buffer)
        if self._takes_memory is False:
            return as_tuple(self._saved())
        taken: list[object] = []
        watch = self._captured and self._takes_memory is None
        with ExitStack() as stack:
            stack.enter_context(self._turns.pool())
            if not self._captured:
                stack.enter_context(uncollected())
            elif watch:
                stack.enter_context(noted_allocations(self._machine, taken))
            outputs = as_tuple(self._saved())
        if watch:
            self._takes_memory = bool(taken)
        self._captured = True
        return outputs
