"""Parts of a scheduled GPU function that threads run: its kernels, and the blocks that are outside all of them.

TVM compiles a block outside every thread binding into a loop on the host, which then reads and writes device memory:
the process dies at the first call, with no message.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import s_tir, tirx

from relaxtune.schedules.marks import SOURCES_ATTR
from relaxtune.schedules.tir.blocks import child_statements, holds_block

# Code made without loops to bind (sorts, scans, templates) names its threads in statements of these kinds.
_LAUNCHES = ("thread_extent", "virtual_thread")


def list_unbound_blocks(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the innermost blocks of a PrimFunc that are outside every thread binding."""
    return list(_unbound(func.body, bound=False))


def launches_threads(func: tirx.PrimFunc) -> bool:
    """Return whether any part of a PrimFunc runs on threads already."""
    return _launches(func.body) > 0


def count_launches(func: tirx.PrimFunc) -> int:
    """Return how many kernels a scheduled GPU PrimFunc launches; one that is no schedule of blocks is one kernel.

    A call of a vendor's library counts as one, whatever the library launches for it.
    """
    calls = 1 if func.attrs and SOURCES_ATTR in func.attrs else 0
    return max(1, _launches(func.body) + calls)


def _launches(stmt: tirx.Stmt) -> int:
    return 1 if _is_launch(stmt) else sum(_launches(part) for part in child_statements(stmt))


def _unbound(stmt: tirx.Stmt, *, bound: bool) -> Iterator[str]:
    if isinstance(stmt, s_tir.SBlockRealize):
        body = stmt.block.body
        if holds_block(body):
            yield from _unbound(body, bound=bound)
        elif not bound and not _launches(body):
            yield str(stmt.block.name_hint)
        return
    bound = bound or _is_launch(stmt)
    for part in child_statements(stmt):
        yield from _unbound(part, bound=bound)


def _is_launch(stmt: tirx.Stmt) -> bool:
    if isinstance(stmt, tirx.For):
        return int(stmt.kind) == int(tirx.ForKind.THREAD_BINDING)
    return isinstance(stmt, tirx.AttrStmt) and str(stmt.attr_key) in _LAUNCHES
