"""Which parts of a scheduled GPU function threads run: its kernels, and the blocks that are outside all of them.

TVM compiles a block outside every thread binding into a loop on the host, which then reads and writes device memory:
the process dies at the first call, with no message.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import s_tir, tirx

from relaxtune.schedules.marks import SOURCES_ATTR

# Code made without loops to bind (sorts, scans, templates) names its threads in statements of these kinds.
_LAUNCHES = ("thread_extent", "virtual_thread")


def list_unbound_blocks(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the innermost blocks of a PrimFunc that are outside every thread binding."""
    return list(_unbound(func.body, bound=False))


def count_launches(func: tirx.PrimFunc) -> int:
    """Return how many kernels a scheduled GPU PrimFunc launches; one that is no schedule of blocks is one kernel.

    A call of a vendor's library counts as one, whatever the library launches for it.
    """
    calls = 1 if func.attrs and SOURCES_ATTR in func.attrs else 0
    return max(1, _launches(func.body) + calls)


def _launches(stmt: tirx.Stmt) -> int:
    if _is_launch(stmt):
        return 1
    if isinstance(stmt, s_tir.SBlockRealize):
        return _launches(stmt.block.body)
    return sum(_launches(part) for part in _parts(stmt))


def _unbound(stmt: tirx.Stmt, *, bound: bool) -> Iterator[str]:
    if isinstance(stmt, s_tir.SBlockRealize):
        body = stmt.block.body
        if _holds_block(body):
            yield from _unbound(body, bound=bound)
        elif not bound and not _launches_threads(body):
            yield str(stmt.block.name_hint)
        return
    bound = bound or _is_launch(stmt)
    for part in _parts(stmt):
        yield from _unbound(part, bound=bound)


def _holds_block(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, s_tir.SBlockRealize) or any(_holds_block(part) for part in _parts(stmt))


def _launches_threads(stmt: tirx.Stmt) -> bool:
    return _is_launch(stmt) or any(_launches_threads(part) for part in _parts(stmt))


def _is_launch(stmt: tirx.Stmt) -> bool:
    if isinstance(stmt, tirx.For):
        return int(stmt.kind) == int(tirx.ForKind.THREAD_BINDING)
    return isinstance(stmt, tirx.AttrStmt) and str(stmt.attr_key) in _LAUNCHES


def _parts(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements directly inside one; none for a block, whose body is another matter."""
    if isinstance(stmt, tirx.SeqStmt):
        return list(stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return [branch for branch in (stmt.then_case, stmt.else_case) if branch is not None]
    body = getattr(stmt, "body", None)
    return [body] if isinstance(body, tirx.Stmt) else []
