"""Pieces of Hopper kernels in TIRx, each emitted into the current IRBuilder: tensor maps, barriers, rings of stages."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

_TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_ELEMENT_BYTES = 2

# Keeps the compiler from moving a use of an accumulator above the wait for the wgmma that writes it.
_PIN = "relaxtune_pin"
_PIN_SOURCE = """
__forceinline__ __device__ void relaxtune_pin(float& value) { asm volatile("" : "+f"(value) :: "memory"); }
"""


def encode_map(
    name: str, matrix: tirx.Var, dtype: str, shape: tuple[int, int], box: tuple[int, int], swizzle: int
) -> tirx.Var:
    """Emit the encoding of a tensor map (host code) and return the map.

    Parameters
    ----------
    name : str
        Of the kernel's parameter.
    matrix : Var
        A buffer that is read as a row-major matrix of 2-byte elements.
    dtype : str
        Of its elements.
    shape, box : pair of int
        Rows and columns of the matrix, and of what one load copies.
    swizzle : int
        TMA's mode: 0 none, 1, 2 and 3 for rows of 32, 64 and 128 bytes.
    """
    rows, columns = shape
    encoded = T.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap"))
    IRBuilder.name(name, encoded)
    # Sizes and byte strides, box and element strides, all innermost first; interleave 0, the swizzle mode, L2 promotion
    # 2 (128 bytes), fill 0 (zeros).
    sizes = (columns, rows, columns * _ELEMENT_BYTES, box[1], box[0], 1, 1, 0, swizzle, 2, 0)
    T.evaluate(T.call_packed("runtime.cuTensorMapEncodeTiled", encoded, dtype, 2, matrix.data, *sizes))
    return encoded


def load_box(to: tirx.Expr, source: tirx.Var, inner: tirx.Expr, outer: tirx.Expr, full: tirx.Expr) -> None:
    """Emit a TMA load of the box at column `inner`, row `outer` of a tensor map; its bytes arrive at barrier `full`."""
    T.evaluate(T.ptx[_TMA_LOAD](to, T.address_of(source), inner, outer, full))


def initialise_barrier(barrier: tirx.Expr, arrivals: int) -> None:
    """Emit the initialisation of an mbarrier."""
    T.evaluate(T.ptx.mbarrier.init.shared.b64(barrier, T.uint32(arrivals)))


def arrive(barrier: tirx.Expr) -> None:
    """Emit one arrival at an mbarrier."""
    T.evaluate(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))


def pin(registers: tirx.Var, count: int) -> None:
    """Emit a use of registers that no later use may be moved above; after the wait for the wgmma that writes them."""
    for index in range(count):
        T.evaluate(T.cuda.func_call(_PIN, registers[index], source_code=_PIN_SOURCE))


class Ring:
    """Stage and parity of a ring of mbarriers, in two registers."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._stage = T.alloc_local([1], "int32")
        self._phase = T.alloc_local([1], "int32")
        self.set(0, 0)

    @property
    def stage(self) -> tirx.Expr:
        """The stage in use."""
        return self._stage[0]

    @property
    def phase(self) -> tirx.Expr:
        """The parity of the barriers' current round."""
        return self._phase[0]

    @property
    def previous(self) -> tirx.Expr:
        """The stage before the one in use."""
        return (self.stage + self._depth - 1) % self._depth

    def set(self, stage: tirx.Expr | int, phase: tirx.Expr | int) -> None:
        """Emit a jump to a stage."""
        T.buffer_store(self._stage, stage, [0])
        T.buffer_store(self._phase, phase, [0])

    def advance(self) -> None:
        """Emit the step to the next stage."""
        T.buffer_store(self._stage, self.stage + 1, [0])
        with T.If(self.stage == self._depth), T.Then():
            self.set(0, self.phase ^ 1)
