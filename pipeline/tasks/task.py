"""`TuningTask`: one fused kernel to make, deduplicated over all models of a job."""

from __future__ import annotations

import builtins
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import tvm


@dataclass(frozen=True)
class SizeOfTable:
    """A function of a model with a symbolic number of rows, and one number of them."""

    model: str
    function: str
    rows: int


@dataclass(frozen=True)
class TuningTask:
    """One kernel to make.

    Attributes
    ----------
    name
        Name of the PrimFunc in its first module; unique within a job.
    mod
        IRModule with that one PrimFunc as `main`, unscheduled, `global_symbol` "main".
    workload_hash
        Structural hash of `mod` as text: the key of MetaSchedule traces.
    family
        Operator family: "matmul", "batch_matmul", "conv", "norm", "softmax", "reduction", "gather", "elementwise", ...
    signature
        What the kernel means, independent of its IR: canonical JSON text of the family, the sizes (M, N, K, batch ...),
        dtypes and the epilogue; the key of template and library parameters.
    weight
        How often it runs in one inference, summed over the job's models.
    flops, bytes
        Arithmetic operations and bytes read plus written by one run (each buffer once).
    onnx_nodes
        Names of the ONNX nodes it computes, over all its calls.
    functions
        model name -> names of the PrimFuncs in that model's module which are this task.
    index_ranges
        Parameter position -> exclusive upper bound of the integers it may hold (for index arguments).
    tables
        The functions of symbolic sizes that this is one size of: its kernel may be in their tables.
    """

    name: str
    mod: tvm.ir.IRModule
    workload_hash: str
    family: str
    signature: str
    weight: int
    flops: float
    bytes: float
    onnx_nodes: tuple[str, ...]
    functions: Mapping[str, tuple[str, ...]]
    index_ranges: Mapping[int, int]
    tables: tuple[SizeOfTable, ...] = ()

    @cached_property
    def pickled_mod(self) -> builtins.bytes:
        """`mod` for another process, compressed (level 1: a sixth): each of the task's candidates takes it there."""
        return zlib.compress(pickle.dumps(self.mod), 1)

    def joined(self, other: TuningTask) -> TuningTask:
        """Return this task for the models of another of its workload too: weights, nodes and functions are joined."""
        return replace(
            self,
            weight=self.weight + other.weight,
            functions={**self.functions, **other.functions},
            onnx_nodes=tuple(dict.fromkeys(self.onnx_nodes + other.onnx_nodes)),
            tables=tuple(dict.fromkeys(self.tables + other.tables)),
        )
