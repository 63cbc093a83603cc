"""A MetaSchedule TuneContext without the start-up work that our searches do not need."""

from __future__ import annotations

import logging

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logging_func

_LOG = logging.getLogger("relaxtune.metaschedule")


class QuietTuneContext(ms.TuneContext):  # type: ignore[misc]  # TVM's classes carry no types
    """A TuneContext whose construction does not import all of TVM's tensor intrinsics.

    That import takes 15 seconds of CPU time in every process; a space generator that needs some brings its own.
    What MetaSchedule says goes to the logger `relaxtune.metaschedule`.

    Parameters
    ----------
    mod : IRModule
        The task's module.
    target : Target
        What is compiled for.
    space : SpaceGenerator
        The design space; a context takes it over, since it keeps state.
    strategy : SearchStrategy or None
        What proposes candidates; None when only the designs are wanted.
    name : str
        For messages.
    seed : int
        From 1 on, or -1 for a random one.
    threads : int
        Of the search.
    """

    def __init__(
        self,
        mod: tvm.ir.IRModule,
        target: tvm.target.Target,
        space: ms.SpaceGenerator,
        strategy: ms.SearchStrategy | None = None,
        *,
        name: str = "main",
        seed: int = -1,
        threads: int = 1,
    ) -> None:
        log = get_logging_func(_LOG)
        self.__init_handle_by_constructor__(
            _ffi_api.TuneContext, mod, target, space, strategy, name, threads, seed, log
        )
        _ffi_api.TuneContextInitialize(self)
