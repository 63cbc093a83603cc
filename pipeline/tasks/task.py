"""`TuningTask`: one fused kernel to make, deduplicated over all models of a job; `TaskFacts` is what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import tvm

from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.schedules.templates.cut import Place


@dataclass(frozen=True)
class SizeOfTable:
    """A function of a model with symbolic sizes, and one place among them: a number of rows, or sizes by name."""

    model: str
    function: str
    place: Place
    is_default: bool = False  # Whether the user named no sizes.
    points: tuple[str, ...] = ()  # The tuned sizes of the model that come to this place.

    @property
    def text(self) -> str:
        """The place for a reader."""
        return " ".join(f"{name}={size}" for name, size in self.place)


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a kernel to make, without its code."""

    name: str  # Name of the PrimFunc in its first module; unique within a job.
    workload_hash: str  # Structural hash of its module as text: the key of MetaSchedule traces.
    # Operator family: "matmul", "batch_matmul", "conv", "norm", "softmax", "reduction", "gather", "elementwise", ...
    family: str
    # Meaning of the kernel, independent of its IR: canonical JSON text of the family, the sizes (M, N, K, batch ...),
    # dtypes and the epilogue; the key of template and library parameters.
    signature: str
    weight: int  # How often it runs in one inference, summed over the job's models.
    # Arithmetic operations and bytes read plus written by one run (each buffer once).
    flops: float
    bytes: float
    onnx_nodes: tuple[str, ...]  # Names of the ONNX nodes it computes, over all its calls.
    # model name -> names of the PrimFuncs in that model's module which are this task.
    functions: Mapping[str, tuple[str, ...]]
    # Parameter position -> exclusive upper bound of the integers it may hold (for index arguments).
    index_ranges: Mapping[int, int]
    # The functions of symbolic sizes that this is one size of: its kernel may be in their tables.
    tables: tuple[SizeOfTable, ...] = ()

    def joined(self, other: TaskFacts) -> Self:
        """Return this task for the models of another of its workload too: weights, nodes and functions are joined."""
        return replace(
            self,
            weight=self.weight + other.weight,
            functions={**self.functions, **other.functions},
            onnx_nodes=tuple(dict.fromkeys(self.onnx_nodes + other.onnx_nodes)),
            tables=tuple(dict.fromkeys(self.tables + other.tables)),
        )


@dataclass(frozen=True, kw_only=True)
class TuningTask(TaskFacts):
    """One kernel to make."""

    packed: PackedModule  # `mod` as bytes: of a task, the module would be most of what a driver keeps.
    symbolic: PackedModule | None = None  # The function of `tables`, with the marks that its own table is made by.

    @property
    def mod(self) -> tvm.ir.IRModule:
        """IRModule with the one PrimFunc as `main`, unscheduled, `global_symbol` "main"; unpacked anew (0.5 ms)."""
        return self.packed.make()
