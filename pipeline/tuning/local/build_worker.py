"""The child that compiles candidates.

A candidate becomes one shared object, which loads in 0.2 ms. Between scheduling and code generation, it goes through
the same steps as an artifact's kernel (`pipeline.codegen`).
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact


@dataclass(frozen=True)
class BuildRequest:
    """A pickled `Buildable`, the pickled target, and the file to write, without suffix."""

    what: bytes
    target: bytes
    stem: str


def start() -> Callable[[object], object]:
    """Import TVM and return the function that builds."""
    import tvm

    from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels
    from relaxtune.pipeline.codegen.kernel_hash import kernel_hash
    from relaxtune.pipeline.codegen.library_objects import compile_library_objects, list_library_sources
    from relaxtune.pipeline.spans import span
    from relaxtune.pipeline.tuning.measure.launch_memory import DynamicSharedMemory
    from relaxtune.pipeline.tuning.measure.recipe import scheduled
    from relaxtune.pipeline.tuning.measure.resources import parse_compiler_log
    from relaxtune.schedules.templates.lowering import tir_pipeline_for

    def build(request: object) -> object:
        if not isinstance(request, BuildRequest):
            raise TypeError(f"expected a BuildRequest, got {type(request).__name__}")
        with span("build: schedule"):
            mod = scheduled(pickle.loads(request.what))
            target = pickle.loads(request.target)
            finished = finish_kernels(mod, target)
            built = kernel_hash(finished["main"], target.kind.name)
        log: list[str] = []
        dynamic = DynamicSharedMemory()
        instruments = [dynamic] if target.kind.name == "cuda" else []
        context = tvm.transform.PassContext(opt_level=3, instruments=instruments)
        with span("build: compile"), device_toolchain(target, log.append), context, target:
            compile_ = partial(tvm.compile, finished, target, tir_pipeline=tir_pipeline_for(finished))
            try:
                executable = compile_()
            except (RuntimeError, ValueError) as e:
                # A scheduled candidate has its tensor intrinsics inlined already. Their import takes 11 (CUDA) to 15
                # seconds (all).
                if "is not registered" not in str(e) or "tvm.s_tir.tensor_intrin" in sys.modules:
                    raise
                importlib.import_module("tvm.s_tir.tensor_intrin")
                executable = compile_()
        sources = list_library_sources(finished.functions.values(), target.kind.name)
        with span("build: link"), temporary_folder() as directory:
            path = _link(executable.mod, request.stem, compile_library_objects(sources, Path(directory)))
        resources = replace(parse_compiler_log("\n".join(log), dynamic.bytes), kernel_hash=built)
        return BuiltArtifact(path, hashlib.sha256(Path(path).read_bytes()).hexdigest(), resources)

    return build


def _link(module: object, stem: str, library_objects: Sequence[Path]) -> str:
    from tvm.runtime import Module, _ffi_api

    from relaxtune.pipeline.workers.linking import link_to_load

    if not isinstance(module, Module):
        raise TypeError(f"expected a compiled module, got {type(module).__name__}")
    objects = [f"{stem}.o"]
    module.write_to_file(objects[0])
    if module.imports:
        # The device code, as data of the same shared object.
        objects.append(f"{stem}.dev.o")
        host_target = str(module.get_function("_get_target_string")())
        packed = _ffi_api.ModulePackImportsToLLVM(module, False, host_target, "")
        packed.write_to_file(objects[1])
    path = f"{stem}.so"
    try:
        link_to_load(path, [*objects, *library_objects])
    finally:
        for name in objects:
            Path(name).unlink()
    return path
