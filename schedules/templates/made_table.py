"""A table of kernels that another process made, as the compilation that takes it sees it.

    shell       the table as one function: it chooses, and has places for its kernels
    lowered     for each place the host code that launches, and a stub of each device kernel
    units       for each device kernel the module that has its machine code

Most of a table is device code: 400,000 to 1,900,000 characters of JSON a kernel. It stays where it was made. A stub has
the name, the parameters and the attributes of its kernel, and nothing to do; it takes the kernel's way through the
passes, and in place of generating code for it the unit is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import IRModule

from relaxtune.schedules.marks import ELSEWHERE_ATTR
from relaxtune.schedules.templates.launch_table import split_table

_KEY, _ATOMICS, _LAUNCHES, _HASH = "key", "atomics", "launches", "hash"


@dataclass(frozen=True)
class TableFacts:
    """What is looked up in the kernels of a table: whether they have atomic operations, their launches, their hash."""

    atomics: bool
    launches: int
    kernel_hash: str


@dataclass(frozen=True)
class MadeTable:
    """A table whose kernels another process made.

    Attributes
    ----------
    key
        Names it among all that a process has.
    shell
        Its function (`make_shell`).
    kernels
        How many it has.
    lowered
        For each kernel the host code, under the function's name, and stubs.
    units
        Name of a device kernel -> what will have its machine code.
    make
        Makes the function here, with its kernels.
    """

    key: str
    shell: tirx.PrimFunc
    kernels: int
    lowered: Sequence[IRModule]
    units: Mapping[str, Future[tvm.runtime.Module]]
    make: Callable[[], tirx.PrimFunc]

    @cached_property
    def function(self) -> tirx.PrimFunc:
        """The table with its kernels, made here."""
        return self.make()


def make_shell(table: tirx.PrimFunc, facts: TableFacts, key: str) -> tirx.PrimFunc:
    """Return a table with places for its kernels, and what is looked up in these."""
    told = {_KEY: key, _ATOMICS: facts.atomics, _LAUNCHES: facts.launches, _HASH: facts.kernel_hash}
    return split_table(table).choice.with_attr(ELSEWHERE_ATTR, told)


def facts_of(func: tirx.PrimFunc) -> TableFacts | None:
    """Return what is known of the kernels that a shell has places for; None for any other function."""
    told = _told(func)
    return None if told is None else TableFacts(bool(told[_ATOMICS]), int(told[_LAUNCHES]), str(told[_HASH]))


def with_stubs(lowered: IRModule, function: str, key: str) -> IRModule:
    """Return a lowered kernel's host code, which has the function's name, with stubs in place of device code."""
    return IRModule(
        {name: func if name.name_hint == function else _stub(func, key) for name, func in lowered.functions.items()}
    )


def lowered_elsewhere(func: tirx.PrimFunc) -> Sequence[IRModule] | None:
    """Return the lowered kernels of a shell; None for any other function.

    Raises
    ------
    ValueError
        No compilation that is under way here has the kernels of this shell.
    """
    made = _held(func)
    return None if made is None else made.lowered


def is_elsewhere(func: tirx.PrimFunc) -> bool:
    """Whether a function is a shell or a stub: its code is elsewhere."""
    return _told(func) is not None


def unit_elsewhere(name: str, kernel: tirx.PrimFunc) -> Future[tvm.runtime.Module] | None:
    """Return the module that has the code of a stub, under its name in the module; None for any other kernel.

    Raises
    ------
    ValueError
        As of `lowered_elsewhere`.
    """
    made = _held(kernel)
    return None if made is None else made.units[name]


_TABLES: ContextVar[Mapping[str, MadeTable]] = ContextVar("made_tables")


@contextmanager
def holding_tables(tables: Mapping[str, MadeTable]) -> Iterator[None]:
    """Let compilations of this thread, inside the block, take tables by their keys."""
    token = _TABLES.set(tables)
    try:
        yield
    finally:
        _TABLES.reset(token)


def _held(func: tirx.PrimFunc) -> MadeTable | None:
    told = _told(func)
    if told is None:
        return None
    tables, key = _TABLES.get({}), str(told[_KEY])
    if key not in tables:
        raise ValueError(
            f"table {key!r} was made for a compilation that is not under way: expected one of {sorted(tables)}; "
            "compile the choice's `scheduled` in place of its outline"
        )
    return tables[key]


def _told(func: tirx.PrimFunc) -> Any:
    return func.attrs.get(ELSEWHERE_ATTR) if func.attrs else None


def _stub(kernel: tirx.PrimFunc, key: str) -> tirx.PrimFunc:
    made = tirx.PrimFunc(kernel.params, tirx.Evaluate(tirx.IntImm("int32", 0)), kernel.ret_type)
    for name, value in kernel.attrs.items():
        made = made.with_attr(name, value)
    return made.with_attr(ELSEWHERE_ATTR, {_KEY: key})
