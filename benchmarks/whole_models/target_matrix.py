"""Compile zoo models, untuned, for every CUDA target: routes of the kernels, what they take of a GPU, and seconds.

    python -m benchmarks.whole_models.target_matrix [--models MODEL ...] [--targets cuda:sm_80,cuda:sm_86] [--jobs 2]
        [--out FILE [--keep]]

MODEL is as in `benchmarks.whole_models.kernel_hashes`. Nothing is run, so no GPU is needed; CUDA's compiler is. Kernels
are made without records. Of each kernel, the result names its route, its template, and for a default schedule its
reason. Of each cubin it has the registers, shared memory and spills that ptxas tells. Exits 1 when a model fails, a
kernel spills, or one asks for more shared memory than a block of its target may have. With `--keep`, rows that FILE has
of other models and targets stay; each row names its commit.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import tvm

from benchmarks.gpu_arms.results import machine
from benchmarks.this_run import commit_here
from benchmarks.whole_models.kernel_hashes import parse_case
from relaxtune.pipeline.artifact import compile as compiling
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.finish import device_toolchain
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tuning.measure.launch_memory import DynamicSharedMemory
from relaxtune.pipeline.tuning.measure.resources import parse_compiler_log
from relaxtune.schedules.targets.capabilities import capabilities_of
from relaxtune.tuning_db.records import Route

TARGETS = "cuda:sm_80,cuda:sm_86,cuda:sm_89,cuda:sm_90,cuda:sm_90a,cuda:sm_120"
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_FULL_WIDTH = ("bert-base", "gpt2-small", "gpt2-small-decode", "llama-1b", "llama-1b-decode", "vit-base", "t5-small")
MODELS = (*(f"{name}-2-layers:fp16" for name in _FULL_WIDTH), "whisper-base-2-layers:fp16", "bert-base-2-layers")


@contextmanager
def overheard() -> Iterator[tuple[list[str], DynamicSharedMemory]]:
    """Yield what ptxas tells, and the shared memory that launches ask for, of the models compiled inside the block."""
    logs, dynamic, context = list[str](), DynamicSharedMemory(), compiling.pass_context

    @contextmanager
    def watched(cuda_graph: bool) -> Iterator[None]:
        with context(cuda_graph):
            tvm.transform.PassContext.current().override_instruments([dynamic])
            yield

    with (
        mock.patch.object(compiling, "device_toolchain", partial(device_toolchain, on_log=logs.append)),
        mock.patch.object(compiling, "pass_context", watched),
    ):
        yield logs, dynamic


def compiled(text: str, target: str) -> dict[str, Any]:
    """Return what compiling a model for a target gave; `error` when it failed."""
    logging.getLogger("relaxtune").setLevel(logging.ERROR)
    case, started = parse_case(text), time.perf_counter()
    found: dict[str, Any] = {"model": text, "target": target}
    try:
        prepared = prepare_model(ModelRequest(case.source, case.shapes, target, LoweringOptions(precision=case.policy)))
        choices = select_kernels(
            prepared.lowered, prepared.tasks, database=None, target=prepared.target, environment=prepared.environment
        )
        with overheard() as (logs, dynamic):
            module = compiling.compile_module(prepared.lowered, choices, prepared.target)
    except Exception as error:
        # A failure is a result here, and makes the command fail at the end.
        return {**found, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
    resources = parse_compiler_log("\n".join(logs))
    spilling = {name: bytes_ for log in logs for name, bytes_ in spills(log).items() if bytes_}
    limit = capabilities_of(prepared.target.arch).shared_bytes_optin
    chosen = {choice.function: choice for choice in module.choices}
    default = [name for name in prepared.lowered.kernels if name not in chosen or chosen[name].route is Route.FALLBACK]
    return {
        **found,
        "seconds": round(time.perf_counter() - started, 1),
        "kernels": len(prepared.lowered.kernels),
        "default_schedules": {name: chosen[name].note if name in chosen else "no task" for name in default},
        "registers_max": resources.registers,
        "spill_bytes": spilling,
        # Static and at launch, each of the kernel that takes most; a kernel of a template takes one of them.
        "shared_bytes_max": max(resources.smem_bytes or 0, dynamic.bytes),
        "shared_bytes_limit": limit,
    }


def _compiled_pair(commit: str | None, pair: tuple[str, str]) -> dict[str, Any]:
    return {**compiled(*pair), "commit": commit}


def spills(log: str) -> dict[str, int]:
    """Return kernel -> bytes that a thread stores to and loads from local memory for want of registers."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]
        found[name] = sum(int(stored) + int(loaded) for stored, loaded in _SPILLS.findall(part))
    return found


def at_fault(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a row, None when nothing is."""
    if "error" in row:
        return str(row["error"])
    if row["spill_bytes"]:
        return "spills: " + ", ".join(f"{name} {count} bytes" for name, count in row["spill_bytes"].items())
    if row["shared_bytes_max"] > row["shared_bytes_limit"]:
        return f"{row['shared_bytes_max']} bytes of shared memory, {row['shared_bytes_limit']} at most"
    return None


def main() -> None:
    """Compile everything, and print a line for each model and target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--targets", default=TARGETS, help=f"separated by commas; default: {TARGETS}")
    parser.add_argument("--jobs", type=int, default=2, help="models compiled side by side")
    parser.add_argument("--commit", default=commit_here(), help="the commit that is compiled, where there is no git")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep rows of FILE that are not compiled again")
    arguments = parser.parse_args()
    pairs = [(model, target) for model in arguments.models for target in arguments.targets.split(",")]
    rows: list[dict[str, Any]] = []
    before = rows_of(arguments.out) if arguments.keep and arguments.out is not None else []
    # Not an executor with `max_tasks_per_child`: CPython's stands still once a process is worn (python/cpython#115634).
    with get_context("spawn").Pool(arguments.jobs, maxtasksperchild=8) as pool:
        for made in pool.imap_unordered(partial(_compiled_pair, arguments.commit), pairs):
            rows.append(made)
            row, fault = rows[-1], at_fault(rows[-1])
            told = fault or f"{row['kernels']} kernels, {len(row['default_schedules'])} by default schedules"
            print(f"{row['model']} {row['target']}: {told}, {row.get('seconds')} s", flush=True)
            if arguments.out is not None:
                document = {"machine": machine(), "rows": with_rows(before, rows)}
                arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if any(map(at_fault, rows)) else 0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, each with its commit; none where there is no file."""
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return [{**row, "commit": row.get("commit", document.get("commit"))} for row in document["rows"]]


def with_rows(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows, and those of before of other models and targets, in order."""
    made = {_place(row) for row in rows}
    return sorted([*(row for row in before if _place(row) not in made), *rows], key=_place)


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["model"]), str(row["target"])


if __name__ == "__main__":
    main()
