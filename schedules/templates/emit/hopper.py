"""Pieces of Hopper kernels in TIRx, each emitted into the current IRBuilder: tensor maps, barriers, rings of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.tir.blocks import Size, shape_of

_TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"

# Keeps the compiler from moving a use of an accumulator above the wait for the wgmma that writes it.
_PINS = {
    "float32": """
__forceinline__ __device__ void relaxtune_pin(float& value) { asm volatile("" : "+f"(value) :: "memory"); }
""",
    "uint32": """
__forceinline__ __device__ void relaxtune_pin_integer(unsigned& value) { asm volatile("" : "+r"(value) :: "memory"); }
""",
}
# A value that the compiler takes for the same in all threads of a warp, and so keeps in a uniform register.
_UNIFORM = """
__forceinline__ __device__ int relaxtune_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
"""

_DESCRIPTOR = """
__forceinline__ __device__ unsigned long long relaxtune_descriptor(int low, unsigned high) {
  return static_cast<unsigned long long>(high) << 32 | static_cast<unsigned>(low);
}
"""


@lru_cache(maxsize=256)
def instruction(name: str) -> Callable[..., tirx.Expr]:
    """Return what makes the call of a PTX instruction; TVM takes as long to find it as to make the call."""
    found: Callable[..., tirx.Expr] = T.ptx[name]
    return found


def encode_tensor(
    name: str,
    tensor: tirx.Var,
    dtype: str,
    sizes: Sequence[Size],
    strides: Sequence[Size],
    box: Sequence[int],
    swizzle: int,
    *,
    offset: int = 0,
    empty: tuple[tirx.Expr, tirx.Var] | None = None,
) -> tirx.Var:
    """Emit the encoding of a tensor map of any number of axes (host code) and return the map.

    `name` is the kernel's parameter's, `dtype` the elements' (any of 8 bits is uint8). `sizes` and `box` are elements
    along each axis of the tensor and of what one load copies, the contiguous axis first; `strides` are bytes from one
    element to the next along each axis but the first. Sizes and strides may be expressions of the host. `swizzle` is
    TMA's mode: 0 none, 1, 2 and 3 for rows of 32, 64 and 128 bytes. The tensor begins `offset` elements behind the
    buffer's start, a multiple of 16 bytes. `empty` says when it has no elements, and whose address is given then.
    """
    encoded = T.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap"))
    IRBuilder.name(name, encoded)
    axes = len(sizes)
    # After the boxes the element strides; interleave 0, the swizzle mode, L2 promotion 2 (128 bytes), fill 0 (zeros).
    numbers = (*sizes, *strides, *box, *[1] * axes, 0, swizzle, 2, 0)

    def encode(address: tirx.Expr) -> None:
        T.evaluate(T.call_packed("runtime.cuTensorMapEncodeTiled", encoded, dtype, axes, address, *numbers))

    address = tensor.data if offset == 0 else tensor.ptr_to(_unflatten(offset, tensor))
    if empty is None:
        encode(address)
        return encoded
    with T.If(empty[0]):
        with T.Then():
            encode(empty[1].data)
        with T.Else():
            encode(address)
    return encoded


def load_tile(to: tirx.Expr, source: tirx.Var, at: Sequence[tirx.Expr | int], full: tirx.Expr, blocks: int = 1) -> None:
    """Emit a TMA load of the box at a position of a tensor map; its bytes arrive at barrier `full`.

    `at` is the box's first element along each axis, the contiguous axis first. With several `blocks`, the load writes
    to the same place in each of the cluster's blocks, and arrives at each one's own barrier.
    """
    name = _TMA_LOAD.replace(".2d.", f".{len(at)}d.")
    if blocks == 1:
        T.evaluate(instruction(name)(to, T.address_of(source), *at, full))
    else:
        mask = tirx.const(2**blocks - 1, "uint16")
        T.evaluate(instruction(name + ".multicast::cluster")(to, T.address_of(source), *at, full, mask))


def store_tile(target: tirx.Var, at: Sequence[tirx.Expr | int], source: tirx.Expr) -> None:
    """Emit a TMA store of a box in shared memory to a position of a tensor map; what lies outside is left out."""
    name = f"cp.async.bulk.tensor.{len(at)}d.global.shared::cta.bulk_group"
    T.evaluate(instruction(name)(T.address_of(target), *at, source))


def uniform(value: tirx.Expr) -> tirx.Expr:
    """Return an int32 that is the same in all threads of a warp, in a form that tells the compiler so."""
    return device_call(_UNIFORM, value)


def matrix_descriptor(
    address: tirx.Expr, leading: int, stride: int, swizzle: int
) -> tuple[tirx.Expr, Callable[[tirx.Expr], tirx.Expr]]:
    """Return the low half of a matrix descriptor of wgmma, and what makes a descriptor of a low half.

    An offset in units of 16 bytes may be added to the low half, which is uniform: 32-bit sums stay in uniform registers
    where those of whole descriptors did not, which took 430 cycles for four instructions of 64 columns.

    `address` is in shared memory, at a multiple of the swizzle's period; `leading` and `stride` are the byte offsets of
    PTX's descriptor, in units of 16 bytes; `swizzle` is TMA's mode: 1, 2 and 3 for rows of 32, 64 and 128 bytes.
    """
    # wgmma numbers the modes the other way round, in the topmost two bits.
    high = stride | (4 - swizzle) << 30
    window = tirx.Cast("int32", T.cuda.cvta_generic_to_shared(address))

    def with_low(low: tirx.Expr) -> tirx.Expr:
        upper = tirx.const(high, "uint32")
        return device_call(_DESCRIPTOR, low, upper)

    # In a cluster, the upper bits of an address say whose shared memory it is in.
    return uniform(((window & 0x3FFFF) >> 4) | (leading << 16)), with_low


def initialise_barrier(barrier: tirx.Expr, arrivals: int) -> None:
    """Emit the initialisation of an mbarrier."""
    T.evaluate(instruction("mbarrier.init.shared.b64")(barrier, T.uint32(arrivals)))


def expect_bytes(barrier: tirx.Expr, count: int) -> None:
    """Emit one arrival at an mbarrier, which is complete once so many bytes have arrived, too."""
    T.evaluate(instruction("mbarrier.arrive.expect_tx.shared.b64")(barrier, T.uint32(count)))


def arrive(barrier: tirx.Expr) -> None:
    """Emit one arrival at an mbarrier."""
    T.evaluate(instruction("mbarrier.arrive.shared.b64")(barrier, T.uint32(1)))


def arrive_in_all(barrier: tirx.Expr, blocks: int) -> None:
    """Emit one arrival at the mbarrier that is at the same place in every one of a cluster's blocks."""
    window = T.cuda.cvta_generic_to_shared(barrier)
    remote = T.alloc_local([1], "uint32")
    for rank in range(blocks):
        T.evaluate(T.ptx.mapa.shared__cluster.u32(remote[0], window, T.uint32(rank)))
        # Not `.release.cluster`: it waits for all that the thread wrote to reach the cluster, 1.2 us a time.
        T.evaluate(instruction("mbarrier.arrive.shared::cluster.b64")(remote[0], T.uint32(1)))


def wait_for_cluster() -> None:
    """Emit a barrier of all threads of a cluster."""
    T.evaluate(T.ptx.barrier.cluster.arrive.release())
    T.evaluate(T.ptx.barrier.cluster.wait.acquire())


def pin(registers: tirx.Var, count: int, dtype: str = "float32") -> None:
    """Emit a use of registers that no later use may be moved above; after the wait for the wgmma that writes them.

    `dtype` is the registers': float32 or uint32.
    """
    for index in range(count):
        T.evaluate(device_call(_PINS[dtype], registers[index]))


class Ring:
    """Stage and parity of a ring of mbarriers, in two registers.

    `stage` is the one in use, `previous` that before it; `phase` is the parity of the barriers' current round.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._stage = T.alloc_local([1], "int32")
        self._phase = T.alloc_local([1], "int32")
        self.stage, self.phase = self._stage[0], self._phase[0]
        self.previous = (self.stage + depth - 1) % depth
        self.set(0, 0)

    def set(self, stage: tirx.Expr | int, phase: tirx.Expr | int) -> None:
        """Emit a jump to a stage."""
        T.buffer_store(self._stage, stage, [0])
        T.buffer_store(self._phase, phase, [0])

    def advance(self) -> None:
        """Emit the step to the next stage."""
        T.buffer_store(self._stage, self.stage + 1, [0])
        with T.If(self.stage == self._depth), T.Then():
            self.set(0, self.phase ^ 1)


def _unflatten(offset: Size, tensor: tirx.Var) -> list[Size]:
    indices: list[Size] = []
    for size in reversed(shape_of(tensor) or ()):
        done = isinstance(offset, int) and offset == 0
        indices.insert(0, 0 if done else offset % size)
        offset = 0 if done else offset // size
    return indices
