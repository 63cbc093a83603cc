"""Copies of boxes of tensors by TMA, and the tensor maps that they take; all emit into the current IRBuilder.

Addresses and strides are multiples of 16 bytes, sides of boxes 256 at most (CUDA driver API, cuTensorMapEncodeTiled;
PTX ISA 9.0, "Tensor Memory Access": cp.async.bulk.tensor).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import instruction
from relaxtune.schedules.tir.blocks import Size, shape_of

_TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"


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


def end_stores() -> None:
    """Emit the end of a group of stores."""
    T.evaluate(T.ptx["cp.async.bulk.commit_group"]())


def wait_for_stores_to_read() -> None:
    """Emit the wait until all groups of the thread's stores have read shared memory."""
    T.evaluate(T.ptx["cp.async.bulk.wait_group.read"](0))


def prefetch_maps(*maps: tirx.Var) -> None:
    """Emit the fetching of tensor maps."""
    for tensor_map in maps:
        T.evaluate(instruction("prefetch.tensormap")(T.address_of(tensor_map)))


def order_before_tma() -> None:
    """Emit what makes writes to shared memory, of barriers too, visible to TMA, which is another proxy."""
    T.evaluate(instruction("fence.proxy.async.shared::cta")())


def _unflatten(offset: Size, tensor: tirx.Var) -> list[Size]:
    indices: list[Size] = []
    for size in reversed(shape_of(tensor) or ()):
        done = isinstance(offset, int) and offset == 0
        indices.insert(0, 0 if done else offset % size)
        offset = 0 if done else offset // size
    return indices
