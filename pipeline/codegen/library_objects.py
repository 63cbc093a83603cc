"""The object files in C that code is linked with: calls of vendor libraries, and the threads of parallel loops on CPUs.

Each library of `schedules.libraries` has a small C source of its own; `cpu_threads.c` is in all code for CPUs. A
candidate and an artifact are linked with them alike: an artifact needs no Python, and what is measured is what ships.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import tvm
import tvm_ffi.libinfo
from tvm import tirx
from tvm.support import cc

from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.workers.linking import run_compiler
from relaxtune.pipeline.workers.machine_faults import how_it_failed
from relaxtune.schedules.libraries.vendors import library_sources
from relaxtune.schedules.marks import SOURCES_ATTR

# As C whichever compiler it is: linking needs a C++ compiler only.
_FLAGS = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-c")
_CPU_THREADS = Path(__file__).with_name("cpu_threads.c")


def list_library_sources(scheduled: Iterable[tvm.ir.BaseFunc], kind: str) -> list[Path]:
    """Return the C sources that scheduled functions need on a target of a kind, each once."""
    if kind == "llvm":
        return [_CPU_THREADS]
    names = {
        str(name)
        for func in scheduled
        if isinstance(func, tirx.PrimFunc) and func.attrs
        for name in func.attrs.get(SOURCES_ATTR, ())
    }
    return library_sources(sorted(names))


def compile_library_objects(sources: Sequence[Path], directory: Path) -> list[Path]:
    """Write the object files of C sources into a directory and return them.

    Raises `LoweringError`: there is no compiler, or it failed.
    """
    if not sources:
        return []
    compiler = cc.get_cc()
    if compiler is None:
        raise LoweringError(
            f"no C++ compiler on the path to compile {sources[0].name}: install one (Debian: apt install g++)"
        )
    objects = []
    for source in sources:
        made = directory / f"{source.stem}.o"
        made.write_bytes(_compiled(compiler, source))
        objects.append(made)
    return objects


@cache
def _compiled(compiler: str, source: Path) -> bytes:
    """Return the object file of a source, made once a process: a process that builds candidates needs it for each."""
    folders = [f"-I{folder}" for folder in tvm_ffi.libinfo.include_paths()]
    with temporary_folder() as directory:
        made = Path(directory) / f"{source.stem}.o"
        command = [compiler, *_FLAGS, *folders, str(source), "-o", str(made)]
        finished = run_compiler(command, Path(directory))
        if finished.returncode != 0:
            error = how_it_failed(compiler, finished.returncode, finished.stderr)
            raise LoweringError(f"the compiler failed on {source.name}: {error}")
        return made.read_bytes()
