"""Untuned artifacts for several CUDA targets on one GPU, beside torch in a CUDA graph with its FlashAttention-2 forced.

    python -m benchmarks.whole_models.bench_targets_gpu build DIR [--cases bert-base,...] [--targets cuda:sm_80,...]
                                                                  [--jobs 4]
    python -m benchmarks.whole_models.bench_targets_gpu run DIR [--cases ...] [--runs 100] [--out FILE.json]

`build` compiles each case for each target, without records and validation, and needs no GPU (without one, name it:
`cuda:sm_80@H200`); artifacts for targets without the suffix `a` are portable, so that the driver translates those for
an older GPU. What is there already is kept. `run` takes every artifact of a case that DIR has. All arms of a case run
in one process: each is compared with the float32 module first, then they are timed in alternation. torch is restricted
to its FlashAttention-2 (`sdpa_kernel`); a second arm of it runs linear layers by cuBLASLt's kernels without wgmma too
(`gpu_arms.mma_sync_linear`), since cuBLAS has no switch that leaves wgmma out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_arms.cases import Case, find_cases, weights_of
from benchmarks.this_run import commit_here

if TYPE_CHECKING:
    from benchmarks.gpu_arms.arm import DeviceArm
    from benchmarks.gpu_arms.mma_sync_linear import LinearOnMmaSync

TARGETS = "cuda:sm_80,cuda:sm_90,cuda:sm_90a"
TORCH_ARM = "torch flash graph"
OLD_TORCH_ARM = "torch flash graph without wgmma"
_SECONDS = ".seconds"


def build(directory: Path, cases: tuple[Case, ...], targets: list[str], jobs: int) -> None:
    """Compile every case for every target that DIR lacks, so many cases side by side."""
    if jobs == 1:
        for case in cases:
            build_case(directory, case, targets)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        pool.starmap(build_case, [(directory, case, targets) for case in cases], chunksize=1)


def build_case(directory: Path, case: Case, targets: list[str]) -> None:
    """Compile a case for every target that DIR lacks."""
    from relaxtune.pipeline.jobs.compile_and_tune import compile_model
    from relaxtune.pipeline.prepare import ModelRequest

    for target in targets:
        arch, _, _ = target.removeprefix("cuda:").partition("@")
        out = directory / case.name / arch
        if out.exists():
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        request = ModelRequest(case.source, case.shapes, target, portable=not arch.endswith("a"))
        compile_model(request, out, samples=0)
        seconds = round(time.perf_counter() - started, 1)
        (out.parent / f"{arch}{_SECONDS}").write_text(f"{seconds}\n", encoding="utf-8")
        print(f"{case.name} {arch}: {seconds} s", flush=True)


def compile_seconds(directory: Path) -> dict[str, float]:
    """Return the seconds that each artifact took to compile, by case and target."""
    found = sorted(directory.glob(f"*/*{_SECONDS}"))
    return {f"{one.parent.name} {one.name.removesuffix(_SECONDS)}": float(one.read_text()) for one in found}


def linear_on_mma_sync() -> LinearOnMmaSync:
    """Return what makes torch's linear layers run on mma.sync."""
    from benchmarks.gpu_arms.mma_sync_linear import LinearOnMmaSync

    return LinearOnMmaSync()


def run_case(case: Case, directory: Path, runs: int, warmup: int, old: LinearOnMmaSync | None) -> dict[str, object]:
    """Return one case's result: arms that are right are timed, the others are named with the reason."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from benchmarks.gpu_arms import torch_models
    from benchmarks.gpu_arms.own_arm import own_arm
    from benchmarks.gpu_arms.timing import time_arms
    from benchmarks.gpu_arms.torch_arms import graph_arm
    from benchmarks.gpu_arms.worker import ARM_TOLERANCE, checked, reference_outputs

    torch.set_grad_enabled(False)
    weights, inputs = weights_of(case.proto()), case.inputs()
    expected = reference_outputs(case, weights, inputs)
    made: dict[str, DeviceArm] = {}
    for place in sorted(path for path in (directory / case.name).iterdir() if path.is_dir()):
        made[place.name] = own_arm(case, inputs, place)
    # FlashAttention-2 takes no mask; the timed inputs have no padding.
    module = torch_models.build(case, weights, inputs, device="cuda", dtype=torch.float16, masked=False)
    tensors = torch_models.device_inputs(case, inputs, "cuda", torch.float16)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        made[TORCH_ARM] = graph_arm(module, tensors)
        if old is not None:
            with old:
                made[OLD_TORCH_ARM] = graph_arm(module, tensors)
    agreements = {name: checked(arm, expected) for name, arm in made.items()}
    right = {name: arm for name, arm in made.items() if agreements[name].passed}
    skipped = {name: f"wrong result: {one.reason(ARM_TOLERANCE)}" for name, one in agreements.items() if not one.passed}
    timed = time_arms(right, runs=runs, warmup=warmup)
    medians = "  ".join(f"{name} {one['median_ms']:.4f} ({one['device_median_ms']:.4f})" for name, one in timed.items())
    print(f"{case.name}: {medians}  {skipped or ''}", flush=True)
    return {
        "case": case.name,
        "skipped": skipped,
        "agreement": {name: {"passed": one.passed, "max_abs": dict(one.max_abs)} for name, one in agreements.items()},
        "arms": {name: {**one, "notes": dict(made[name].notes)} for name, one in timed.items()},
        "linear_layers_without_wgmma": {} if old is None else dict(old.notes),
    }


def main() -> None:
    """Build or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cases", help="names of cases or models, separated by commas; default: all")
    parser.add_argument("--targets", default=TARGETS, help=f"of `build`, separated by commas; default: {TARGETS}")
    parser.add_argument("--layers", type=int, help="of each model; default: all of them")
    parser.add_argument("--jobs", type=int, default=1, help="of `build`: cases side by side")
    parser.add_argument("--without-wgmma", action="store_true", help="of `run`: torch without wgmma, too")
    parser.add_argument("--runs", type=int, default=100, help="of `run`: timed runs of each arm")
    parser.add_argument("--warmup", type=int, default=20, help="of `run`: untimed runs of each arm before")
    parser.add_argument(
        "--commit", default=commit_here(), help="of `run`: the commit of the artifacts, where there is no git"
    )
    parser.add_argument("--out", type=Path, help="of `run`: where the raw values go, as JSON")
    arguments = parser.parse_args()
    cases = find_cases(arguments.cases)
    if arguments.layers is not None:
        cases = tuple(case.with_layers(arguments.layers) for case in cases)
    if arguments.command == "build":
        build(arguments.directory, cases, arguments.targets.split(","), arguments.jobs)
        return
    from benchmarks.gpu_arms.results import machine

    there = [case for case in cases if (arguments.directory / case.name).is_dir()]
    if not there:
        sys.exit(f"{arguments.directory} has no artifact of these cases; make them with `build`")
    document: dict[str, object] = {
        "machine": machine(),
        "commit": arguments.commit,
        "compile_seconds": compile_seconds(arguments.directory),
    }
    found: list[dict[str, object]] = []
    for case in there:
        old = linear_on_mma_sync() if arguments.without_wgmma else None
        found.append(run_case(case, arguments.directory, arguments.runs, arguments.warmup, old))
        if arguments.out is not None:
            partial = arguments.out.with_suffix(".part")
            partial.write_text(json.dumps({**document, "cases": found}, indent=1) + "\n", encoding="utf-8")
            shutil.move(partial, arguments.out)


if __name__ == "__main__":
    main()
