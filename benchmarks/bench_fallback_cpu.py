"""Compare our untuned CPU code with ONNX Runtime: same model, inputs, threads and machine, rounds in turn.

    python benchmarks/bench_fallback_cpu.py [MODEL] [--threads 2] [--rounds 9] [--calls 5]

Each side runs its rounds in a process of its own: two thread pools that spin in one process would slow each other down.
A round is `calls` timed calls after one warm-up call. Medians are over all calls. The result is printed and written to
`benchmarks/results/fallback_cpu_MODEL.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


def make_feeds(model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for spec in model.inputs:
        if "mask" in spec.name:
            feeds[spec.name] = np.ones(spec.shape, spec.dtype)
        elif spec.dtype.startswith("int"):
            high = 2 if "type" in spec.name else 100
            feeds[spec.name] = rng.integers(0, high, spec.shape).astype(spec.dtype)
        else:
            feeds[spec.name] = rng.standard_normal(spec.shape).astype(spec.dtype)
    return feeds


def lower_and_build(proto, target):
    """Return the built executable, the rule of each kernel, and the seconds that it took.

    A pass list of its own, so that it measures the schedules and no other part of the pipeline.
    """
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    from schedules.fallback import apply_fallback, fallback_rule_names

    started = time.perf_counter()
    mod = from_onnx(proto, keep_params_in_input=False)
    transform = relax.transform
    with target:
        mod = tvm.transform.Sequential(
            [
                transform.DecomposeOpsForInference(),
                transform.CanonicalizeBindings(),
                transform.FoldConstant(),
                transform.LegalizeOps(),
                transform.AnnotateTIROpPattern(),
                transform.FoldConstant(),
                transform.DeadCodeElimination(),
                transform.FuseOps(),
                transform.FuseTIR(),
            ]
        )(mod)
        rules = fallback_rule_names(mod, target)
        mod = tvm.transform.Sequential(
            [
                transform.RewriteDataflowReshape(),
                transform.ToNonDataflow(),
                transform.RemovePurityChecking(),
                transform.CallTIRRewrite(),
                transform.StaticPlanBlockMemory(),
                transform.LowerAllocTensor(),
                transform.KillAfterLastUse(),
                transform.LowerRuntimeBuiltin(),
                transform.ComputePrimValue(),
                transform.VMShapeLower(),
                transform.AttachGlobalSymbol(),
            ]
        )(apply_fallback(mod, target))
        executable = relax.build(mod, target=target, relax_pipeline=tvm.transform.Sequential([]))
    return executable, rules, time.perf_counter() - started


def serve_ours(name: str, threads: int, pipe: Connection) -> None:
    # Read by TVM's thread pool when the library is loaded; by default it takes half of the processors on x86.
    os.environ["TVM_NUM_THREADS"] = str(threads)
    import tvm
    from tvm import relax

    from models import load_model
    from schedules.targets import resolve_target

    model = load_model(name)
    executable, rules, compile_s = lower_and_build(model.inline_proto(), resolve_target("llvm").target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    arguments = [tvm.runtime.tensor(value) for value in make_feeds(model).values()]

    def call() -> np.ndarray:
        result = machine["main"](*arguments)
        return (result if hasattr(result, "numpy") else result[0]).numpy()

    pipe.send({"compile_s": compile_s, "rules": rules, "output": call()})
    serve_rounds(call, pipe)
    pipe.send(profile(machine, arguments))


def serve_peer(name: str, threads: int, pipe: Connection) -> None:
    import onnxruntime

    from models import load_model

    model = load_model(name)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.inline_proto().SerializeToString(), options)
    feeds = make_feeds(model)

    def call() -> np.ndarray:
        return session.run(None, feeds)[0]

    pipe.send({"version": onnxruntime.__version__, "output": call()})
    serve_rounds(call, pipe)
    pipe.send(None)


def serve_rounds(call, pipe: Connection) -> None:
    while (calls := pipe.recv()) > 0:
        call()
        times = []
        for _ in range(calls):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
        pipe.send(times)


def profile(machine, arguments, repeats: int = 5) -> list[dict]:
    """Return the median time of each kernel of the module, the heaviest first."""
    started: dict[str, float] = {}
    times: dict[str, list[float]] = defaultdict(list)

    def note(_function, name: str, before: bool, _result, *_arguments) -> None:
        if before:
            started[name] = time.perf_counter()
        else:
            times[name].append((time.perf_counter() - started[name]) * 1e6)

    machine.set_instrument(note)
    for _ in range(repeats):
        machine["main"](*arguments)
    rows = [
        {"kernel": name, "median_us": statistics.median(values), "calls": len(values) // repeats}
        for name, values in times.items()
    ]
    return sorted(rows, key=lambda row: -row["median_us"] * row["calls"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="bert-base")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    sides = {}
    for side, serve in (("ours", serve_ours), ("onnxruntime", serve_peer)):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(options.model, options.threads, there), daemon=True)
        process.start()
        sides[side] = (here, process, here.recv())
    error = float(np.abs(sides["ours"][2].pop("output") - sides["onnxruntime"][2].pop("output")).max())

    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, (pipe, _, _) in sides.items():
            pipe.send(options.calls)
            times[side] += pipe.recv()
            time.sleep(0.1)  # both pools spin for a while after their last task
    kernels = None
    for side, (pipe, process, _) in sides.items():
        pipe.send(0)
        kernels = pipe.recv() if side == "ours" else kernels
        process.join()

    medians = {side: statistics.median(values) for side, values in times.items()}
    ratio = medians["ours"] / medians["onnxruntime"]
    report = {
        "model": options.model,
        "threads": options.threads,
        "processor": platform.processor() or platform.machine(),
        "onnxruntime": sides["onnxruntime"][2]["version"],
        "compile_s": sides["ours"][2]["compile_s"],
        "max_abs_error": error,
        "median_ms": medians,
        "fastest_ms": {side: min(values) for side, values in times.items()},
        "ratio": ratio,
        "rules": sides["ours"][2]["rules"],
        "kernels": kernels,
        "raw_ms": times,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"fallback_cpu_{options.model}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{options.model}, {options.threads} threads, compiled in {report['compile_s']:.1f} s, max error {error:.2e}")
    for side, median in medians.items():
        print(f"  {side:12s} median {median:8.2f} ms   fastest {min(times[side]):8.2f} ms")
    print(f"  ours / onnxruntime = {ratio:.2f}")
    for row in (kernels or [])[:16]:
        print(f"  {row['median_us']:9.0f} us x {row['calls']:3d}  {row['kernel']}")


if __name__ == "__main__":
    main()
