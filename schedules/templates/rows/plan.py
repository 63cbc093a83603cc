"""Sizes of the kernel of `template.py` for a function and parameters, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.templates.base import Parameters, refuse_registers
from relaxtune.schedules.templates.emit.accesses import Access, Accesses
from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.dataflow import Dataflow

LANES_MAX = 16
_WARP = 32
# Elements that a thread holds.
_HELD_MAX = 128
# Chunks of a row that is not held that are in flight together.
_TOGETHER = 4
# Registers that a thread needs beside the elements that it holds.
_REGISTERS_BESIDE = 24
# Beside what was loaded for an element: the compiler keeps some values from one pass to the next.
_REGISTERS_PER_ELEMENT = 0.1


@dataclass(frozen=True)
class RowsParameters(Parameters):
    """Shares of one kernel."""

    template: ClassVar[str] = "rows"

    lanes: int = 8  # Neighbouring elements that a thread loads together.
    threads: int = 32  # That share a row: a power of two up to 32, or whole warps.
    rows: int = 4  # Of a block.
    # Whether a thread keeps its part of a row in registers; else it is read again for each reduction and the output.
    held: bool = True
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.


@dataclass(frozen=True)
class RowsPlan:
    """Sizes of one kernel."""

    parameters: RowsParameters  # What it is made from.
    vectors: int  # Vectors of a row.
    chunks: int  # Vectors that one thread makes at most.
    together: int  # Chunks that are read before anything is computed from them.
    warps: int  # That share a row, 1 where a part of one does.
    blocks: int  # Of the grid.
    threads: int  # Of a block.
    registers: int  # Of a thread, estimated.


def make_plan(flow: Dataflow, accesses: Accesses, p: RowsParameters, limits: CudaLimits) -> RowsPlan | Refusal:
    """Return the sizes of the kernel for a function, or why there is none with these parameters.

    `accesses` are the function's with the parameters' `lanes`.
    """
    if p.threads < 1 or (p.threads % _WARP if p.threads > _WARP else _WARP % p.threads):
        return Refusal(f"threads is {p.threads}, expected a power of two up to {_WARP} or a multiple of it")
    block = p.threads * p.rows
    if p.rows < 1 or block > limits.max_threads_per_block or block % _WARP:
        return Refusal(
            f"{p.rows} rows of {p.threads} threads, expected a multiple of {_WARP} up to {limits.max_threads_per_block}"
        )
    vectors = flow.columns.size // p.lanes
    chunks = math.ceil(vectors / p.threads)
    if p.held and chunks * p.lanes > _HELD_MAX:
        return Refusal(f"{chunks * p.lanes} elements a thread, expected {_HELD_MAX} at most")
    together = chunks if p.held else min(chunks, _TOGETHER)
    held = sum(_held_bytes(access) for access in accesses.found if not access.per_row)
    registers = _REGISTERS_BESIDE + math.ceil(together * p.lanes * (held / 4 + _REGISTERS_PER_ELEMENT))
    refusal = refuse_registers(registers, block, limits)
    if refusal is not None:
        return refusal
    return RowsPlan(
        parameters=p,
        vectors=vectors,
        chunks=chunks,
        together=together,
        warps=max(1, p.threads // _WARP),
        blocks=math.ceil((flow.planned or flow.rows) / p.rows),
        threads=block,
        registers=registers,
    )


def _held_bytes(access: Access) -> float:
    """Return the bytes of registers that an element takes: an access of less than a register has one to itself."""
    return max(element_bytes(access.dtype), 4 / max(1, access.width))
