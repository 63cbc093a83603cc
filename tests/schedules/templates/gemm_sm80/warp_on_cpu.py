"""A kernel's own source for a warp, compiled for this processor; shared memory as the kernel's copies lay it out."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
from tvm import tirx
from tvm.sym import Analyzer

from relaxtune.schedules.templates.emit.tensor_cores import chunk_place

_CHUNK_BYTES = 16


def compiled(source: str, folder: Path) -> ctypes.CDLL:
    """Return C++ source as a library."""
    library = folder / "lanes.so"
    command = ["g++", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return ctypes.CDLL(str(library))


def laid_out(tile: np.ndarray, together: int) -> np.ndarray:
    """Return the memory of a tile, chunks of 16 bytes of each row where the copies put them."""
    rows, columns = tile.shape
    each = _CHUNK_BYTES // tile.itemsize
    width = columns // each
    # The pattern repeats after 8 rows.
    pattern = [[constant(chunk_place(of(r), of(c), width, each, together)) for c in range(width)] for r in range(8)]
    memory = np.empty(tile.size, tile.dtype)
    for r in range(rows):
        for c in range(width):
            at = pattern[r % 8][c] + r // 8 * 8 * columns
            memory[at : at + each] = tile[r, each * c : each * (c + 1)]
    return memory


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return where an array lies."""
    return array.ctypes.data_as(ctypes.c_void_p)


def of(value: int) -> tirx.Expr:
    """Return a number as code has it."""
    return tirx.IntImm("int32", value)


def constant(expression: tirx.Expr) -> int:
    """Return the value of an expression without variables."""
    return int(Analyzer().simplify(expression))
