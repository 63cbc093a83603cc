"""Kernels of the GEMM template beside cuBLAS on a Hopper GPU, at BERT-base's shapes, each checked before it is timed.

    python benchmarks/bench_gemm_sm90.py build DIR [--candidates 8]     anywhere with a CUDA compiler; needs no GPU
    python benchmarks/bench_gemm_sm90.py run DIR [--rounds 100] [--out FILE.json]       on the GPU; needs no TVM

`run` needs torch and cuda-bindings. Every kernel first runs on fresh random inputs into an output full of NaN, and is
compared with a float32 product. Then all arms of a shape are timed by turns, as CUDA graphs over rotating buffers that
do not fit the L2 cache together:

- ours: the candidates that the template proposes, epilogue included;
- cublas: `torch.matmul` alone, without any epilogue (a floor for a library with every epilogue built in);
- torch: `torch.addmm` with the bias, and what else the epilogue needs in further kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# name -> rows M, columns N, depth K, epilogue
CASES = {
    f"{name}-{rows}": (rows, n, k, epilogue)
    for rows in (128, 4096)
    for name, n, k, epilogue in (
        ("qkv", 2304, 768, "bias"),
        ("attention-output", 768, 768, "residual"),
        ("ffn-up", 3072, 768, "gelu"),
        ("ffn-down", 768, 3072, "residual"),
    )
}
CHECKS = 20
# Relative error of a float16 result of a float32 sum: rounding the output gives 2.1e-4 on normal values.
ERROR_MAX = 6e-4
BYTES_PER_TURN = 160_000_000
LAUNCHES_PER_GRAPH = 24


def build(directory: Path, candidates: int) -> None:
    """Compile the first candidates of every case and describe them in a manifest."""
    import tvm
    import tvm_ffi
    from tvm.tirx.compilation_pipeline import PIPELINE_MAP

    from pipeline.codegen.cuda_compiler import COMPILE_CALLBACK, cuda_compiler
    from schedules.targets import resolve_target
    from schedules.templates.base import Refusal
    from schedules.templates.epilogue import recognise_matmul
    from schedules.templates.gemm_sm90 import CONSTANT_PARAMS_ATTR, GemmSm90
    from schedules.templates.gemm_sm90_plan import make_plan
    from schedules.templates.lowering import register_mixed_pipeline

    directory.mkdir(parents=True, exist_ok=True)
    target, template = resolve_target("cuda:sm_90a"), GemmSm90()
    entries = []
    with cuda_compiler("sm_90a"):
        compile_source = tvm_ffi.get_global_func(COMPILE_CALLBACK)
        cubins: list[bytes] = []

        def capture(code: str) -> bytes:
            cubins.append(bytes(compile_source(code)))
            return cubins[-1]

        tvm_ffi.register_global_func(COMPILE_CALLBACK, capture, override=True)
        for case, (rows, n, k, epilogue) in CASES.items():
            func = fused_matmul(rows, n, k, epilogue).with_attr(CONSTANT_PARAMS_ATTR, [1])
            found = template.candidates(func, target)
            if isinstance(found, Refusal):
                sys.exit(f"{case}: {found.reason}")
            for parameters in found[:candidates]:
                kernel = template.apply(func, target, parameters).with_attr("global_symbol", "main")
                module = tvm.IRModule({"main": kernel})
                bound = tvm.tirx.transform.BindTarget(target.target)(module)
                lowered = PIPELINE_MAP[register_mixed_pipeline()]()[0](bound)
                tvm.tirx.build(module, target=target.target, pipeline=register_mixed_pipeline())
                plan = make_plan(recognise_matmul(func), parameters, target.limits, constant_b=True)
                name = f"{case}-{len(entries)}.cubin"
                (directory / name).write_bytes(cubins.pop())
                entries.append(
                    {
                        "case": case,
                        "decision": parameters.to_json(),
                        "cubin": name,
                        # The data pointer of a buffer has the buffer's name and a suffix.
                        "arguments": [str(p.name).removesuffix("_ptr") for p in lowered["main_kernel"].params],
                        "grid": plan.blocks * parameters.split_k,
                        "block": plan.threads,
                        "cluster": parameters.split_k,
                        "dependent": parameters.dependent,
                        "shared_bytes": plan.shared_bytes,
                        "box_a": [parameters.block_m, 64],
                        "box_b": [64, plan.chunk],
                    }
                )
            print(f"{case}: {min(candidates, len(found))} of {len(found)} candidates built", file=sys.stderr)
    (directory / MANIFEST).write_text(json.dumps(entries, indent=1))


def fused_matmul(rows: int, n: int, k: int, epilogue: str) -> Any:
    """Return float16 `A[rows, k] @ B[k, n] + bias`, then gelu or a residual, as FuseTIR leaves it."""
    from tvm import te, tirx

    a, b = te.placeholder((rows, k), "float16", name="A"), te.placeholder((k, n), "float16", name="B")
    bias, residual = te.placeholder((n,), "float32", name="bias"), te.placeholder((rows, n), "float16", name="residual")
    over = te.reduce_axis((0, k), name="k")
    half = tirx.const(0.5, "float32")

    def product(i: Any, j: Any) -> Any:
        return te.sum(a[i, over].astype("float32") * b[over, j].astype("float32"), axis=over)

    def finish(i: Any, j: Any) -> Any:
        x = biased[i, j]
        if epilogue == "gelu":
            x = x * (half + te.erf(x * tirx.const(0.5**0.5, "float32")) * half)
        if epilogue == "residual":
            x = x + residual[i, j].astype("float32")
        return x.astype("float16")

    total = te.compute((rows, n), product, name="matmul")
    biased = te.compute((rows, n), lambda i, j: total[i, j] + bias[j], name="biased")
    output = te.compute((rows, n), finish, name="output")
    return te.create_prim_func([a, b, bias, *([residual] if epilogue == "residual" else []), output])


class Kernel:
    """A cubin's kernel, launched through the driver."""

    def __init__(self, directory: Path, entry: dict[str, Any]) -> None:
        from cuda.bindings import driver

        self.entry = entry
        self._driver = driver
        self._module = self._checked(driver.cuModuleLoadData((directory / entry["cubin"]).read_bytes()))
        self._function = self._checked(driver.cuModuleGetFunction(self._module, b"main_kernel"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(driver.cuFuncSetAttribute(self._function, attribute, entry["shared_bytes"]))

    def bind(self, tensors: dict[str, Any]) -> Callable[[], None]:
        """Return a function that launches the kernel on some tensors, on torch's current stream."""
        values = [self._argument(name, tensors) for name in self.entry["arguments"]]
        boxed = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in values]
        pointers = [ctypes.addressof(box) if isinstance(box, ctypes.c_uint64) else int(box.getPtr()) for box in boxed]
        packed = (ctypes.c_void_p * len(pointers))(*pointers)

        def launch() -> None:
            # `boxed` is kept alive by being named here.
            assert len(boxed) == len(packed)
            config = self._config()
            self._checked(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(packed), 0))

        return launch

    def _config(self) -> Any:
        import torch

        driver, entry = self._driver, self.entry
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = entry["grid"], 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = entry["block"], 1, 1
        config.sharedMemBytes = entry["shared_bytes"]
        config.hStream = torch.cuda.current_stream().cuda_stream
        kinds, attributes = driver.CUlaunchAttributeID, []
        if entry["dependent"]:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if entry["cluster"] > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = entry["cluster"], 1, 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _argument(self, name: str, tensors: dict[str, Any]) -> Any:
        if name not in ("map_a", "map_b"):
            return tensors[name].data_ptr()
        driver, tensor = self._driver, tensors["A" if name == "map_a" else "B"]
        box = self.entry["box_a" if name == "map_a" else "box_b"]
        rows, columns = tensor.shape
        swizzle = {64: "128B", 32: "64B", 16: "32B"}[box[1]]
        encoded = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            2,
            tensor.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(columns * 2)],
            [driver.cuuint32_t(box[1]), driver.cuuint32_t(box[0])],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return self._checked(encoded)

    def _checked(self, result: tuple[Any, ...]) -> Any:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{self.entry['cubin']}: {result[0]}")
        return result[1] if len(result) == 2 else None


def inputs(case: str) -> dict[str, Any]:
    """Return random tensors of a case, and an output full of NaN."""
    import torch

    rows, n, k, epilogue = CASES[case]
    tensors = {
        "A": torch.randn(rows, k, device="cuda").half(),
        "B": (torch.randn(k, n, device="cuda") / k**0.5).half(),
        "bias": torch.randn(n, device="cuda"),
        "output": torch.full((rows, n), float("nan"), device="cuda", dtype=torch.float16),
    }
    if epilogue == "residual":
        tensors["residual"] = torch.randn(rows, n, device="cuda").half()
    return tensors


def composed(case: str, tensors: dict[str, Any], product: Any) -> Any:
    """Return the epilogue of a case over a product with the bias added."""
    import torch

    epilogue = CASES[case][3]
    if epilogue == "gelu":
        return torch.nn.functional.gelu(product)
    return product + tensors["residual"].to(product.dtype) if epilogue == "residual" else product


def largest_error(case: str, kernel: Kernel) -> float:
    """Return the largest relative error over fresh inputs; NaN when an output was not written."""
    import torch

    worst = 0.0
    for _ in range(CHECKS):
        tensors = inputs(case)
        kernel.bind(tensors)()
        expected = composed(case, tensors, tensors["A"].float() @ tensors["B"].float() + tensors["bias"])
        error = float((tensors["output"].float() - expected).norm() / expected.norm())
        torch.cuda.synchronize()
        worst = error if error != error else max(worst, error)
        if worst != worst:
            break
    return worst


def graphs_of(case: str, kernels: dict[str, Kernel]) -> tuple[dict[str, Any], int, Any]:
    """Return a captured graph for every arm, the launches in one, and what must live as long as the graphs."""
    import torch

    first = inputs(case)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    sets = [first, *(inputs(case) for _ in range(max(1, min(LAUNCHES_PER_GRAPH, BYTES_PER_TURN // size))))]
    bias = [tensors["bias"].half() for tensors in sets]
    arms: dict[str, Callable[[int], Any]] = {
        "cublas": lambda i: torch.matmul(sets[i]["A"], sets[i]["B"], out=sets[i]["output"]),
        "torch": lambda i: composed(case, sets[i], torch.addmm(bias[i], sets[i]["A"], sets[i]["B"])),
    }
    for decision, kernel in kernels.items():
        bound = [kernel.bind(tensors) for tensors in sets]
        arms[decision] = lambda i, bound=bound: bound[i]()
    graphs, repeats = {}, max(1, LAUNCHES_PER_GRAPH // len(sets))
    for name, arm in arms.items():
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(len(sets)):
                arm(i)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for i in range(len(sets) * repeats):
                arm(i % len(sets))
        graphs[name].replay()
    torch.cuda.synchronize()
    return graphs, len(sets) * repeats, (sets, bias)


def time_by_turns(graphs: dict[str, Any], launches: int, rounds: int) -> dict[str, list[float]]:
    """Return microseconds a launch, one figure a round, for every arm."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / launches)
    return times


def run(directory: Path, rounds: int, out: Path | None) -> int:
    """Check and time every kernel; return 1 when one is wrong."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    entries = json.loads((directory / MANIFEST).read_text())
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    wrong = 0
    for case in CASES:
        kernels = {entry["decision"]: Kernel(directory, entry) for entry in entries if entry["case"] == case}
        errors = {decision: largest_error(case, kernel) for decision, kernel in kernels.items()}
        right = {decision: kernel for decision, kernel in kernels.items() if errors[decision] <= ERROR_MAX}
        wrong += len(kernels) - len(right)
        graphs, launches, _alive = graphs_of(case, right)
        times = time_by_turns(graphs, launches, rounds)
        results["cases"][case] = {"errors": errors, "times_us": times}
        medians = {name: statistics.median(values) for name, values in times.items()}
        best = min(right, key=lambda decision: medians[decision])
        place = list(kernels).index(best) + 1
        print(
            f"{case:22} ours {medians[best]:7.2f} us (p95 {sorted(times[best])[int(0.95 * rounds)]:.2f})  "
            f"cublas {medians['cublas']:7.2f}  torch {medians['torch']:7.2f}  "
            f"wrong {len(kernels) - len(right)}/{len(kernels)}  candidate {place}: {best}",
            flush=True,
        )
    if out is not None:
        out.write_text(json.dumps(results, indent=1))
    return 1 if wrong else 0


def main() -> None:
    """Build or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building, running = commands.add_parser("build"), commands.add_parser("run")
    for command in (building, running):
        command.add_argument("directory", type=Path)
    building.add_argument("--candidates", type=int, default=8)
    running.add_argument("--rounds", type=int, default=100)
    running.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory, arguments.candidates)
    else:
        sys.exit(run(arguments.directory, arguments.rounds, arguments.out))


if __name__ == "__main__":
    main()
