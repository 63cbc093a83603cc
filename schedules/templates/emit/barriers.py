"""Who works when in a Hopper kernel: mbarriers, rings of stages, clusters, and warpgroups with roles of their own.

A producer copies tiles to the stages of a ring in shared memory, consumers multiply them. Each stage has two mbarriers:
`full` completes a round once its tiles have arrived, `empty` once the consumers are done with them. Each side keeps its
`Ring`::

    producer                                     consumers
        empty.wait(ring.stage, ring.phase ^ 1)       full.wait(ring.stage, ring.phase)
        full.expect(ring.stage, stage_bytes)         multiply the tiles of ring.stage
        load_tile(..., full.at(ring.stage))          empty.arrive(ring.stage)
        ring.advance()                               ring.advance()

PTX ISA 9.0, "mbarrier", "setmaxnreg", "barrier.cluster".
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.marks import MIN_BLOCKS_ATTR
from relaxtune.schedules.templates.emit.device_function import device_call, instruction

# A value that the compiler takes for the same in all threads of a warp, and so keeps in a uniform register.
_UNIFORM = """
__forceinline__ __device__ int relaxtune_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
"""


class Barriers:
    """A row of `count` mbarriers, taken from a pool of shared memory; so many `arrivals` complete a round of one."""

    def __init__(self, pool: T.SMEMPool, count: int, arrivals: int) -> None:
        self.count, self.arrivals = count, arrivals
        self._barriers = pool.alloc((count,), "uint64", align=8)

    def at(self, stage: tirx.Expr | int) -> tirx.Expr:
        """Return the address of a stage's barrier."""
        return self._barriers.ptr_to([stage])

    def wait(self, stage: tirx.Expr | int, phase: tirx.Expr) -> None:
        """Emit the wait for the end of the round of a parity; a barrier is in round 0 first, and -1 is over."""
        T.evaluate(T.cuda.mbarrier_wait(self.at(stage), phase))

    def expect(self, stage: tirx.Expr | int, size: int) -> None:
        """Emit an arrival that completes the round only once so many bytes have arrived, too."""
        T.evaluate(instruction("mbarrier.arrive.expect_tx.shared.b64")(self.at(stage), T.uint32(size)))

    def arrive(self, stage: tirx.Expr | int, blocks: int = 1) -> None:
        """Emit an arrival, or one at the barrier that is at the same place in each of a cluster's blocks."""
        if blocks == 1:
            T.evaluate(instruction("mbarrier.arrive.shared.b64")(self.at(stage), T.uint32(1)))
            return
        remote = T.alloc_local([1], "uint32")
        for rank in range(blocks):
            find_in_block(remote, 0, self.at(stage), T.uint32(rank))
            # Not `.release.cluster`: it waits for all that the thread wrote to reach the cluster, 1.2 us a time.
            T.evaluate(instruction("mbarrier.arrive.shared::cluster.b64")(remote[0], T.uint32(1)))


def initialise(*rings: tuple[Barriers, ...]) -> None:
    """Emit, for one thread, the initialisation of barriers; those of a tuple are as many, for the same stages."""
    for ring in rings:
        for stage in range(ring[0].count):
            for barriers in ring:
                T.evaluate(instruction("mbarrier.init.shared.b64")(barriers.at(stage), T.uint32(barriers.arrivals)))
    T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())


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


def share_roles(
    producer: tirx.Expr,
    registers: tuple[int, int] | None,
    residents: int,
    produce: Callable[[], None],
    consume: Callable[[], None],
) -> None:
    """Emit the roles of a block's warpgroups: what `produce` emits for the `producer`, what `consume` does for others.

    `registers` are those of a thread of a consumer and of the producer from then on (setmaxnreg); None to leave them.
    `residents` are the blocks that a multiprocessor should hold.
    """

    def take(change: str, number: int) -> None:
        if registers is not None:
            T.evaluate(T.ptx[f"setmaxnreg.{change}.sync.aligned.u32"](registers[number]))

    # setmaxnreg takes effect in a kernel whose registers are capped at its start.
    with T.attr({MIN_BLOCKS_ATTR: residents}), T.If(producer):
        with T.Then():
            take("dec", 1)
            produce()
        with T.Else():
            take("inc", 0)
            consume()


def uniform(value: tirx.Expr) -> tirx.Expr:
    """Return an int32 that is the same in all threads of a warp, in a form that tells the compiler so."""
    return device_call(_UNIFORM, value)


def find_in_block(registers: tirx.Var, index: int, pointer: tirx.Expr, rank: tirx.Expr) -> None:
    """Emit the finding of an address in shared memory of a block of the cluster, as seen from all; into a register."""
    T.evaluate(T.ptx.mapa.shared__cluster.u32(registers[index], T.cuda.cvta_generic_to_shared(pointer), rank))


def arrive_at_cluster() -> None:
    """Emit the arrival at the barrier of all threads of a cluster."""
    T.evaluate(T.ptx.barrier.cluster.arrive.release())


def await_cluster() -> None:
    """Emit the wait at the barrier of a cluster, for a thread that has arrived."""
    T.evaluate(T.ptx.barrier.cluster.wait.acquire())


def meet_cluster() -> None:
    """Emit a barrier of all threads of a cluster."""
    arrive_at_cluster()
    await_cluster()
