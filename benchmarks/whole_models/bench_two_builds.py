"""Artifacts of two builds side by side on one GPU, such as those of two commits of this project.

    python -m benchmarks.whole_models.bench_two_builds OLD NEW [--cases bert-base-1x128,...] [--results FILE]

OLD and NEW are folders that `benchmarks.whole_models.tune_gpu_cases` wrote, each by its own commit. Both artifacts of a
case run in one process on the same inputs: their outputs are compared first, then they are timed alternately, by the
host clock and by CUDA events. The ratio is new over old: below 1, the new one is faster.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.gpu_arms.arm import DeviceArm
from benchmarks.gpu_arms.cases import find_cases
from benchmarks.gpu_arms.own_arm import own_arm
from benchmarks.gpu_arms.results import machine
from benchmarks.gpu_arms.timing import time_arms
from relaxtune.pipeline.artifact.directory import load_manifest

RESULTS = Path(__file__).parents[1] / "results" / "gpu-two-builds.json"


def main() -> None:
    """Compare and time every case; print a line each and write the raw values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder of artifacts")
    parser.add_argument("new", type=Path, help="folder of artifacts")
    parser.add_argument("--cases", help="names of cases or models, separated by commas; default: all")
    parser.add_argument("--runs", type=int, default=200, help="timed runs of each arm")
    parser.add_argument("--warmup", type=int, default=30, help="untimed runs of each arm before")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the raw values go, as JSON")
    arguments = parser.parse_args()
    folders = {"old": arguments.old, "new": arguments.new}
    found: dict[str, object] = {}
    for case in find_cases(arguments.cases):
        inputs = case.inputs()
        arms = {name: own_arm(case, inputs, folder / case.name) for name, folder in folders.items()}
        difference = largest_difference(arms)
        timed = time_arms(arms, runs=arguments.runs, warmup=arguments.warmup)
        manifests = {name: load_manifest(folder / case.name) for name, folder in folders.items()}
        found[case.name] = {
            **timed,
            "largest_difference": difference,
            "launches": {name: manifest.launches for name, manifest in manifests.items()},
            "kernels_with_record": {
                name: sum(kernel.record_id is not None for kernel in manifest.kernels)
                for name, manifest in manifests.items()
            },
        }
        old, new = (float(str(timed[name]["median_ms"])) for name in folders)
        device = [float(str(timed[name]["device_median_ms"])) for name in folders]
        print(
            f"{case.name}: old {old:.4f} ms, new {new:.4f} ms, ratio {new / old:.4f} (by events "
            f"{device[1] / device[0]:.4f}), largest difference of outputs {difference:g}",
            flush=True,
        )
    arguments.results.write_text(json.dumps({"machine": machine(), "cases": found}, indent=1) + "\n", encoding="utf-8")


def largest_difference(arms: dict[str, DeviceArm]) -> float:
    """Return the largest absolute difference between the outputs of two arms on their inputs."""
    for arm in arms.values():
        arm.run()
    old, new = (arm.outputs() for arm in arms.values())
    return max(float((old[name].double() - new[name].double()).abs().max()) for name in old)


if __name__ == "__main__":
    main()
