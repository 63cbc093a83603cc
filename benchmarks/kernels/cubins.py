"""Kernels as cubins: built where TVM is, launched through the driver where it is not, timed alternately.

A benchmark's `build DIR` makes a `CubinWriter` and adds PrimFuncs that templates made; its `run DIR` reads the manifest
with `read_kernels`, and needs torch and cuda-bindings, not TVM. What a launch needs (arguments, tensor maps, grid,
cluster, attributes) is read from the host code that TVM makes of the kernel, so that any kernel can be added.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_KERNEL = "main_kernel"
_DIMENSIONS = ("x", "y", "z")
_DEPENDENT = "tirx.use_programtic_dependent_launch"
_DYNAMIC = "tirx.use_dyn_shared_memory"
_MAP_ELEMENTS = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32", "int8": "UINT8", "uint8": "UINT8"}


def build_and_run_parser(doc: str | None) -> tuple[ArgumentParser, ArgumentParser, ArgumentParser]:
    """Return a benchmark's parser, and those of its `build DIR` and `run DIR`, for more options."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building, running = commands.add_parser("build"), commands.add_parser("run")
    for command in (building, running):
        command.add_argument("directory", type=Path)
    running.add_argument("--out", type=Path)
    return parser, building, running


@dataclass
class CubinWriter:
    """Compiles kernels for one target into a folder; make it with `cubin_writer`."""

    directory: Path
    target: Any
    _cubins: list[bytes]
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kernel: Any, **labels: Any) -> dict[str, Any]:
        """Compile a scheduled PrimFunc (one kernel) and return its entry in the manifest, `labels` included."""
        import tvm
        from tvm.tirx.compilation_pipeline import PIPELINE_MAP

        from relaxtune.schedules.templates.lowering import register_mixed_pipeline

        pipeline = register_mixed_pipeline()
        module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
        bound = tvm.tirx.transform.BindTarget(self.target.target)(module)
        host = PIPELINE_MAP[pipeline]()[0](bound)["main"]
        self._cubins.clear()
        tvm.tirx.build(module, target=self.target.target, pipeline=pipeline)
        (cubin,) = self._cubins
        name = f"{len(self.entries)}.cubin"
        (self.directory / name).write_bytes(cubin)
        params = [[str(p.name), [int(size) for size in p.ty.shape], str(p.ty.dtype)] for p in kernel.params]
        entry = {**labels, "cubin": name, "params": params, **_launch(host)}
        self.entries.append(entry)
        return entry


@contextmanager
def cubin_writer(directory: Path, target: Any) -> Iterator[CubinWriter]:
    """Compile inside the block; the manifest is written at its end."""
    import tvm_ffi

    from relaxtune.pipeline.codegen.cuda_compiler import COMPILE_CALLBACK, cuda_compiler

    directory.mkdir(parents=True, exist_ok=True)
    with cuda_compiler(target.arch):
        compile_source = tvm_ffi.get_global_func(COMPILE_CALLBACK)
        cubins: list[bytes] = []

        def capture(code: str) -> bytes:
            cubins.append(bytes(compile_source(code)))
            return cubins[-1]

        # `cuda_compiler` puts back what it found.
        tvm_ffi.register_global_func(COMPILE_CALLBACK, capture, override=True)
        writer = CubinWriter(directory, target, cubins)
        yield writer
    (directory / MANIFEST).write_text(json.dumps(writer.entries, indent=1))


def _launch(host: Any) -> dict[str, Any]:
    """Return arguments and launch configuration of the only kernel that lowered host code launches."""
    import tvm
    import tvm_ffi

    calls: list[Any] = []
    tvm_ffi.structural_walk(host.body, (tvm.ir.Call, calls.append))
    launches = [call for call in calls if call.op.name == "tirx.call_ffi_kernel"]
    maps: dict[str, Any] = {}
    for call in calls:
        if call.op.name == "tirx.tvm_call_packed" and str(call.args[0].value) == "runtime.cuTensorMapEncodeTiled":
            maps[str(call.args[1].name)] = _map(call.args)
    (launch,) = launches
    tags = [str(tag) for tag in launch.attrs.launch_params]
    sizes = [tag for tag in tags if "Idx." in tag] + ([_DYNAMIC] if _DYNAMIC in tags else [])
    split = len(launch.args) - len(sizes)
    values = dict(zip(sizes, (int(value) for value in launch.args[split:]), strict=True))
    arguments = []
    for argument in launch.args[1:split]:
        name = str(getattr(argument, "name", ""))
        arguments.append({"map": maps[name]} if name in maps else {"buffer": str(argument.args[0].name)})
    return {
        "arguments": arguments,
        "grid": [values.get(f"blockIdx.{d}", 1) for d in _DIMENSIONS],
        "block": [values.get(f"threadIdx.{d}", 1) for d in _DIMENSIONS],
        "cluster": [values.get(f"clusterCtaIdx.{d}", 1) for d in _DIMENSIONS],
        "dependent": _DEPENDENT in tags,
        "shared_bytes": values.get(_DYNAMIC, 0),
    }


def _map(arguments: Sequence[Any]) -> dict[str, Any]:
    """Return a tensor map as cuTensorMapEncodeTiled takes it, its buffer by name."""
    rank = int(arguments[3])
    numbers = [int(value) for value in arguments[5:]]
    parts = []
    for count in (rank, rank - 1, rank, rank, 4):
        parts.append(numbers[:count])
        numbers = numbers[count:]
    keys = ("sizes", "byte_strides", "box", "element_strides", "modes")
    # The address is the buffer's own, or that of one of its elements.
    start = arguments[4].args[0]
    element = int(start.indices[0]) if hasattr(start, "indices") else 0
    buffer = start.source if hasattr(start, "indices") else start
    return {
        "buffer": str(buffer.name),
        "element": element,
        "dtype": str(arguments[2].value),
        **dict(zip(keys, parts, strict=True)),
    }


class Kernel:
    """A cubin's kernel, launched through the driver on torch tensors."""

    def __init__(self, directory: Path, entry: dict[str, Any]) -> None:
        from cuda.bindings import driver

        self.entry = entry
        self._driver = driver
        self._module = self._checked(driver.cuModuleLoadData((directory / entry["cubin"]).read_bytes()))
        self._function = self._checked(driver.cuModuleGetFunction(self._module, _KERNEL.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(driver.cuFuncSetAttribute(self._function, attribute, entry["shared_bytes"]))

    def bind(self, tensors: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that launches the kernel on tensors by parameter name, on torch's current stream."""
        values = [self._argument(argument, tensors) for argument in self.entry["arguments"]]
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
        config.gridDimX, config.gridDimY, config.gridDimZ = entry["grid"]
        config.blockDimX, config.blockDimY, config.blockDimZ = entry["block"]
        config.sharedMemBytes = entry["shared_bytes"]
        config.hStream = torch.cuda.current_stream().cuda_stream
        kinds, attributes = driver.CUlaunchAttributeID, []
        if entry["dependent"]:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if entry["cluster"] != [1, 1, 1]:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = entry["cluster"]
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _argument(self, argument: dict[str, Any], tensors: Mapping[str, Any]) -> Any:
        if "buffer" in argument:
            return tensors[argument["buffer"]].data_ptr()
        driver, tensor_map = self._driver, argument["map"]
        tensor = tensors[tensor_map["buffer"]]
        interleave, swizzle, promotion, fill = tensor_map["modes"]
        encoded = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_ELEMENTS[tensor_map['dtype']]}"),
            len(tensor_map["sizes"]),
            tensor.data_ptr() + tensor_map["element"] * tensor.element_size(),
            [driver.cuuint64_t(size) for size in tensor_map["sizes"]],
            [driver.cuuint64_t(stride) for stride in tensor_map["byte_strides"]],
            [driver.cuuint32_t(size) for size in tensor_map["box"]],
            [driver.cuuint32_t(stride) for stride in tensor_map["element_strides"]],
            driver.CUtensorMapInterleave(interleave),
            driver.CUtensorMapSwizzle(swizzle),
            driver.CUtensorMapL2promotion(promotion),
            driver.CUtensorMapFloatOOBfill(fill),
        )
        return self._checked(encoded)

    def _checked(self, result: tuple[Any, ...]) -> Any:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{self.entry['cubin']}: {result[0]}")
        return result[1] if len(result) == 2 else None


def read_kernels(directory: Path) -> list[Kernel]:
    """Return the kernels of a manifest, loaded on the current device (torch has to have a context there)."""
    return [Kernel(directory, entry) for entry in json.loads((directory / MANIFEST).read_text())]


def captured_graph(launches: Sequence[Callable[[], Any]]) -> Any:
    """Return a CUDA graph of some launches, in their order, that has been replayed once.

    Each is run once before the capture: libraries allocate and compile then.
    """
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_by_turns(graphs: Mapping[str, Any], launches: int, rounds: int, rest_s: float = 0.0) -> dict[str, list[float]]:
    """Return microseconds a launch, one figure a round, for every arm; the GPU rests so many seconds before each."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            time.sleep(rest_s)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / launches)
    return times


def median_and_p95(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    return statistics.median(values), sorted(values)[int(0.95 * len(values))]
