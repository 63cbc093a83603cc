"""Compilers and linkers whose own temporary files lie in a folder of ours, which the next run sweeps.

They write into `$TMPDIR`, and a killed run would leave what lies there under names that tell no owner.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tvm.support import cc

from relaxtune.pipeline.workers.machine_faults import how_it_failed, is_of_the_machine

logger = logging.getLogger(__name__)


def run_compiler(
    command: Sequence[str], folder: Path, *, text: str | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Return a finished compiler or linker that was given `text`, and whose temporary files lay in a folder.

    A compiler that was killed from outside, or whose child was, is started once more.

    Raises `OSError`, `subprocess.TimeoutExpired`: it cannot be started; it took longer than `timeout_s`.
    """
    environment = {**os.environ, "TMPDIR": str(folder)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
        )

    done = run()
    error = how_it_failed(command[0], done.returncode, done.stderr)
    if done.returncode == 0 or not is_of_the_machine(error):
        return done
    logger.warning("a compiler failed and is tried once more: %s", error)
    return run()


def linker_in(folder: Path) -> Callable[..., None]:
    """Return what links a shared library for `Executable.export_library`.

    It raises FileNotFoundError where there is no compiler, and RuntimeError where linking fails.
    """

    def link(output: str, objects: Sequence[str], options: Sequence[str] = ()) -> None:
        compiler = cc.get_cc()
        if compiler is None:
            raise FileNotFoundError("no C++ compiler was found")
        done = run_compiler([compiler, "-shared", "-fPIC", "-o", output, *options, *objects], folder)
        if done.returncode != 0:
            raise RuntimeError(how_it_failed(compiler, done.returncode, done.stdout + done.stderr))

    return link


def link_to_load(output: str, objects: Sequence[str | Path], options: Sequence[str] = ()) -> None:
    """Link object files into what processes of this machine load, by `ld` itself.

    A compiler's driver, as an artifact is linked by, takes six times as long (31 against 5 ms of a processor).

    Raises `OSError`: there is no linker, or it failed.
    """
    done = run_compiler(["ld", "-shared", "-o", output, *options, *map(str, objects)], Path(output).parent)
    if done.returncode != 0:
        raise OSError(how_it_failed("ld", done.returncode, done.stderr))
