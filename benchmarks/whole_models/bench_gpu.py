"""Whole models on one GPU: relaxtune beside torch max-autotune, torch in a CUDA graph, and ONNX Runtime.

    python -m benchmarks.whole_models.bench_gpu [--cases bert-base,...] [--arms relaxtune,max-autotune,eager-graph,ort]
                                   [--artifacts out/gpu] [--runs 100] [--budget S] [--resume]

Every case is a process of its own: all its arms over the same weights and inputs, each checked first against a
float32 reference, then timed taking turns. A few cases prepare (compile) at the same time; one at a time is timed,
while nothing else runs. Results are kept case by case, raw values too. relaxtune's artifacts, one directory a case,
are made before by `python -m benchmarks.whole_models.tune_gpu_cases`. An arm that is not there or fails is left out,
and said. Needs torch; for the `ort` arm onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.util
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.gpu_arms.cases import Case, find_cases
from benchmarks.gpu_arms.children import Child, ChildError
from benchmarks.gpu_arms.order import Order, parse_arms
from benchmarks.gpu_arms.results import Entry, machine, notes, read_entries, table, write_results
from relaxtune.pipeline.cli.output import stdout_console

RESULTS = Path(__file__).parents[1] / "results" / "gpu-models.json"
DEFAULT_ARTIFACTS = Path("out/gpu")
_PREPARE_TIMEOUT_S = 300.0
_TIMING_TIMEOUT_S = 120.0
_MIN_RUNS = 1
# Compiling a case keeps a core or two busy most of the time.
_CORES_FOR_A_CASE = 2.5


def main() -> None:
    """Run the cases and print the table."""
    arguments = _parse()
    console = stdout_console()
    console.print(f"raw values: {arguments.out}", soft_wrap=True)
    entries = asyncio.run(run_cases(arguments, console))
    console.print(table(entries))
    for line in notes(entries):
        console.print(line, markup=False, soft_wrap=True)


async def run_cases(arguments: argparse.Namespace, console: Console) -> list[Entry]:
    """Return the results of all cases, in groups that prepare together; the file is written after each case."""
    began = time.monotonic()
    conditions: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }
    wanted = find_cases(arguments.cases)
    entries = read_entries(arguments.out) if arguments.resume else []
    done = {entry["case"] for entry in entries if "failed" not in entry}
    entries = [entry for entry in entries if entry["case"] in done]
    cases = [case for case in wanted if case.name not in done]
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="bench-gpu-"))
    logs.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(cases), arguments.jobs):
        group = cases[first : first + arguments.jobs]
        left = arguments.budget - (time.monotonic() - began) if arguments.budget else _PREPARE_TIMEOUT_S
        if left <= 0:
            names = ", ".join(case.name for case in cases[first:])
            console.print(f"the budget of {arguments.budget:.0f} s is spent; not run: {names}", style="bold")
            break
        children = [_child(case, arguments, logs) for case in group]
        try:
            ready = await asyncio.gather(
                *(child.prepare(min(left, _PREPARE_TIMEOUT_S)) for child in children), return_exceptions=True
            )
            console.print(f"{time.monotonic() - began:.0f} s: {', '.join(case.name for case in group)} prepared")
            for child, problem in zip(children, ready, strict=True):
                entries.append(await _timed(child, problem))
                write_results(arguments.out, conditions, entries)
        finally:
            for child in children:
                await child.stop()
    return entries


async def _timed(child: Child, problem: BaseException | None) -> Entry:
    """Return a case's entry: its figures, or why there are none."""
    try:
        if problem is not None:
            raise problem
        return await child.time(_TIMING_TIMEOUT_S)
    except ChildError as error:
        return {"case": child.order.case, "failed": str(error), "skipped": dict(child.crashed)}
    finally:
        await child.stop()


def _child(case: Case, arguments: argparse.Namespace, logs: Path) -> Child:
    order = Order(
        case=case.name,
        arms=parse_arms(arguments.arms),
        artifact=str(arguments.artifacts / case.name),
        runs=arguments.runs,
        warmup=arguments.warmup,
        masked=arguments.honour_padding,
        lock=str(logs / "gpu.lock"),
    )
    return Child(order, logs / f"{case.name}.log", child_environment(os.environ, arguments.jobs))


def child_environment(environment: Mapping[str, str], jobs: int) -> dict[str, str]:
    """Return the environment of a case's process: CUDA's libraries beside torch, and its share of the cores."""
    libraries = [environment["LD_LIBRARY_PATH"]] if environment.get("LD_LIBRARY_PATH") else []
    cores = max(1, (os.cpu_count() or 1) // jobs)
    return {
        **environment,
        "LD_LIBRARY_PATH": os.pathsep.join([*nvidia_libraries(), *libraries]),
        "TORCHINDUCTOR_COMPILE_THREADS": str(cores),
        "OMP_NUM_THREADS": str(cores),
        # tvm-ffi would compile an extension for torch's tensors, which no arm uses.
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    }


def nvidia_libraries() -> list[str]:
    """Return the `lib` folders of the nvidia packages beside torch, where ONNX Runtime finds cuBLAS and cuDNN."""
    found = importlib.util.find_spec("nvidia")
    roots: Sequence[str] = list(found.submodule_search_locations or ()) if found else []
    return sorted(str(path) for root in roots for path in Path(root).glob("*/lib"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="names of cases or models, separated by commas; default: all")
    parser.add_argument("--arms", help="names of arms, separated by commas; default: all")
    parser.add_argument("--artifacts", type=Path, default=DEFAULT_ARTIFACTS, help="folder of the artifacts")
    parser.add_argument("--runs", type=int, default=100, help="timed runs of each arm, by each of the two clocks")
    parser.add_argument("--warmup", type=int, default=20, help="runs of each arm before")
    parser.add_argument("--budget", type=float, help="seconds after which no further cases are started")
    parser.add_argument("--jobs", type=int, help="cases that prepare at the same time; default: two for five cores")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--resume", action="store_true", help="keep the cases that the results file has")
    parser.add_argument("--logs", type=Path, help="folder for what the processes print; default: a temporary one")
    parser.add_argument(
        "--honour-padding",
        action="store_true",
        help="peers attend with the padding mask too; without it they run faster and differ only on padded rows",
    )
    arguments = parser.parse_args()
    if arguments.jobs is None:
        arguments.jobs = max(1, int((os.cpu_count() or 1) / _CORES_FOR_A_CASE))
    if arguments.runs < _MIN_RUNS or arguments.jobs < 1 or arguments.warmup < 0:
        parser.error("expected --runs and --jobs of at least 1, --warmup of at least 0")
    try:
        find_cases(arguments.cases)
        parse_arms(arguments.arms)
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    main()
