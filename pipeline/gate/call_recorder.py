"""`CallRecorder`: keeps the inputs of some calls of a service, which the gate replays through two artifacts."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError, UsageError
from relaxtune.pipeline.output_file import output_file

logger = logging.getLogger(__name__)


class CallRecorder:
    """Runs a module, and writes the inputs of every so many calls to a folder, each call whole or not at all.

    Raises `UsageError`: `every` or `most` is below 1.

    Parameters
    ----------
    module : Module
        The module to run.
    folder : Path or str
        Where the calls go, one `.npz` file each; made if missing. Several processes may write to one.
    every : int
        The first call is kept, and each one so many later.
    most : int
        Calls of this process that the folder holds at most; later ones take the places of the oldest.

    Attributes
    ----------
    lost
        Calls that could not be written, which the log names. The service goes on.
    """

    def __init__(self, module: Module, folder: Path | str, *, every: int = 100, most: int = 100) -> None:
        if every < 1 or most < 1:
            raise UsageError(f"calls cannot be recorded with every={every} and most={most}; expected 1 or more of both")
        self.module, self._folder, self._every, self._most = module, Path(folder), every, most
        self._calls = itertools.count()
        self.lost = 0

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs as `Module.run` does; only calls that the module took are kept.

        Raises `PipelineError`: as `Module.run`.
        """
        outputs = self.module.run(inputs)
        number, rest = divmod(next(self._calls), self._every)
        if rest == 0:
            self._keep(inputs, self._folder / f"call-{os.getpid()}-{number % self._most}.npz")
        return outputs

    def _keep(self, inputs: Mapping[str, np.ndarray], path: Path) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with output_file(path, "the recorded call") as file:
                np.savez(file, **inputs)  # type: ignore[arg-type]  # the stub takes every keyword for `allow_pickle`
        except (OSError, PipelineError) as e:
            self.lost += 1
            logger.warning("a call was not recorded in %s: %s; make room there, or name another", self._folder, e)
