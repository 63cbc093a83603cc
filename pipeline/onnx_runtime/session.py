"""A session in ONNX Runtime's process: opened again after that was lost, without optimisations where it crashed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Self, TypeVar

import numpy as np
import onnx

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.onnx_runtime.graph import SplitGraph
from relaxtune.pipeline.onnx_runtime.process import OnnxRuntimeProcess, RestartedError, onnx_runtime
from relaxtune.pipeline.onnx_runtime.requests import Close, Level, Open, Prepare, Refused, Request, Run, Settings, Time
from relaxtune.pipeline.onnx_runtime.shared_arrays import ArraysPlace, SharedArrays, read_arrays
from relaxtune.pipeline.workers.replies import WorkerError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class OnnxRuntimeSession:
    """One model, loaded by ONNX Runtime.

    The graph has its weights inline; `name` is for messages. With `falls_back`, a graph that cannot be loaded or run
    with its optimisations is loaded without any.
    Raises `PipelineError`: ONNX Runtime does not load the model, or ends while it does.
    """

    def __init__(self, proto: onnx.ModelProto, name: str, settings: Settings, *, falls_back: bool = True) -> None:
        self._process: OnnxRuntimeProcess = onnx_runtime()
        self._graph = SplitGraph.of(proto)
        self._name, self._falls_back = name, falls_back
        self._number = self._process.next_number()
        self._generation: int | None = None
        self._killed = False
        self.settings = settings
        #: Why it has no optimisations though its settings have them.
        self.fell_back: str | None = None
        #: Execution providers, as ONNX Runtime lists them.
        self.providers: tuple[str, ...] = ()
        self._do(lambda: None)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let it go."""
        self.close()

    def __del__(self) -> None:
        """Let it go with the next request."""
        if getattr(self, "_generation", None) is not None and self._generation == self._process.generation:
            self._process.forget(self._number)

    def close(self) -> None:
        """Let it go, and give its memory back now; the next request opens it again."""
        if self._generation == self._process.generation:
            with contextlib.suppress(WorkerError, RestartedError):
                self._process.ask(Close((self._number,)), self._generation)
        self._generation = None

    def run(self, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return outputs.

        Raises `PipelineError`: ONNX Runtime does not compute the model on these inputs, or ends while it does.
        """
        with _shared(feeds) as given:
            found = self._do(lambda: self._ask(Run(self._number, tuple(names), given.where), feeds))
            assert isinstance(found, ArraysPlace)
            outputs = read_arrays(found)
        return [outputs[name] for name in names]

    def call(self, names: Sequence[str], feeds: Mapping[str, np.ndarray], place: int = 0) -> Callable[[], float]:
        """Return a call on inputs that stay where it computes, which returns its milliseconds; errors as of `run`.

        It is good until another call is prepared at its place.
        """
        prepared: list[int | None] = [None]

        def prepare() -> None:
            if prepared[0] != self._generation:
                with _shared(feeds) as given:
                    self._ask(Prepare(self._number, tuple(names), given.where, place), feeds)
                prepared[0] = self._generation

        def timed() -> float:
            prepare()
            took = self._ask(Time(self._number, place), feeds)
            assert isinstance(took, float)
            return took

        self._do(prepare)
        return lambda: self._do(timed)

    def _do(self, action: Callable[[], T]) -> T:
        """Return what an action gives once the session is open; again after the process was lost."""
        while True:
            try:
                with self._process.lock:
                    if self._generation != self._process.generation:
                        self._open()
                    return action()
            except RestartedError:
                self._generation = None
            except WorkerError as error:
                self._generation = None
                self._after(error)

    def _ask(self, request: Request, feeds: Mapping[str, np.ndarray]) -> object:
        answer = self._process.ask(request, self._generation)
        if isinstance(answer, Refused):
            shapes = ", ".join(f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in feeds.items())
            raise PipelineError(
                f"ONNX Runtime {self._version} does not compute the model {self._name!r} on inputs of these sizes: "
                f"{shapes}. It says: {answer.reason} Sizes that do not fit together are the usual cause: "
                "`relaxtune inspect` lists the limits of the axes, --shape sets them"
            )
        return answer

    def _open(self) -> None:
        opened = self._ask_open()
        if isinstance(opened, Refused) and self._may_fall_back:
            given, reason = self.settings, opened.reason
            self.settings = replace(given, level=Level.NONE)
            opened = self._ask_open()
            if isinstance(opened, Refused):
                self.settings, opened = given, Refused(reason)
            else:
                self._tell(f"says: {reason}")
        if isinstance(opened, Refused):
            raise PipelineError(
                f"ONNX Runtime {self._version} does not load the model {self._name!r}: {opened.reason} It is the "
                "reference for results; check the graph with `python -m onnx.checker`"
            )
        assert isinstance(opened, tuple)
        self._generation, self.providers = self._process.generation, opened

    def _ask_open(self) -> object:
        graph = self._graph
        return self._process.ask(Open(self._number, graph.graph, graph.weights_key, graph.weights.where, self.settings))

    @property
    def _may_fall_back(self) -> bool:
        return self._falls_back and self.settings.level is not Level.NONE

    @property
    def _version(self) -> str:
        return self._process.description().version

    def _after(self, lost: WorkerError) -> None:
        """Decide how it goes on after the process was lost.

        Raises `PipelineError`: it does not: without optimisations ONNX Runtime is lost too, or something ended it
        twice.
        """
        if lost.from_outside and not self._killed:
            self._killed = True
            logger.warning("ONNX Runtime's process is started again: %s", lost)
        elif not lost.from_outside and self._may_fall_back:
            self.settings = replace(self.settings, level=Level.NONE)
            self._tell(_first_line(lost))
        else:
            raise PipelineError(
                f"ONNX Runtime {self._version} does not answer about the model {self._name!r}: "
                f"{_first_line(lost)}" + ("; is there memory enough?" if lost.from_outside else "")
            ) from lost

    def _tell(self, reason: str) -> None:
        self.fell_back = reason
        logger.warning(
            "the model %s is loaded by ONNX Runtime without graph optimisations: with them, %s", self._name, reason
        )


def _shared(feeds: Mapping[str, np.ndarray]) -> AbstractContextManager[SharedArrays]:
    return contextlib.closing(SharedArrays(feeds.items()))


def _first_line(lost: WorkerError) -> str:
    return str(lost).splitlines()[0].partition(";")[0]
