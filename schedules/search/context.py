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
    Messages of MetaSchedule go to the logger `relaxtune.metaschedule`. A context takes the space over, since that keeps
    state. No strategy is needed where only the designs are wanted. Seeds are from 1 on, or -1 for a random one.
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
