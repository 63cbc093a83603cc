"""Reference kernels: PrimFuncs compiled for the host as they are, without a schedule."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tvm
from tvm import s_tir, tirx
from tvm.runtime import Tensor, _ffi_api

from relaxtune.pipeline.bisect.trace import CallSite, Replacement, output_tensors
from relaxtune.pipeline.codegen.finish import finish_kernels
from relaxtune.pipeline.tasks.extract import as_workload, untunable_reason
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.measure.wrong_result import find_mismatch
from relaxtune.pipeline.validate.tolerances import KernelTolerance, kernel_tolerance, symbolic_kernel_tolerance
from relaxtune.pipeline.workers.linking import link_to_load
from relaxtune.schedules.fallback import apply_fallback

logger = logging.getLogger(__name__)

# Operations of a run up to which unscheduled code is compiled without optimisation: it does some 0.05 GFLOP/s, and
# compiles in a tenth of the time.
UNOPTIMISED_FLOPS_MAX = 5e8
# Up to which it has no schedule at all, at about 0.5 GFLOP/s. Beyond, the default schedules are the reference.
UNSCHEDULED_FLOPS_MAX = 2e10

# Root mean square of the arguments that the tolerances of kernels are made for, uniform in [-1, 1).
_UNIFORM_RMS = 1 / math.sqrt(3)


def ready_for_host(
    mod: tvm.ir.IRModule,
    host: tvm.target.Target,
    calls: Sequence[CallSite],
    unscheduled_flops_max: float = UNSCHEDULED_FLOPS_MAX,
) -> tuple[tvm.ir.IRModule, tvm.target.Target]:
    """Return a module of unscheduled PrimFuncs as it can be compiled for the host, and the target for that.

    They stay without a schedule, so that no rule of ours is in the reference, unless `calls` would take minutes.
    """
    flops = total_flops(mod, calls)
    if flops > unscheduled_flops_max:
        logger.debug("references have the default schedules: %.3g operations a run are too many without", flops)
        return finish_kernels(apply_fallback(mod, host), host), host
    if flops > UNOPTIMISED_FLOPS_MAX:
        return finish_kernels(mod, host), host
    # With a host like itself: that is what kernels are compiled for.
    own = {str(key): value for key, value in host.export().items() if str(key) != "host"}
    unoptimised = tvm.target.Target({**own, "opt-level": 0})
    plain = tvm.target.Target(unoptimised, host=unoptimised)
    return finish_kernels(mod, plain), plain


def total_flops(mod: tvm.ir.IRModule, calls: Sequence[CallSite]) -> float:
    """Return the operations of all calls of a module's PrimFuncs; those of symbolic shapes count nothing."""
    total = 0.0
    for function, count in Counter(call.function for call in calls).items():
        func = mod[function]
        if untunable_reason(func) is None:
            total += count * float(s_tir.analysis.estimate_tir_flops(as_workload(func)))
    return total


def load_code(executable: tvm.runtime.Executable) -> tvm.runtime.Module:
    """Return the code of an executable by way of a shared object; compiling it in memory takes four times as long."""
    # Functions without a graph are code themselves; a graph imports it.
    if all(module.kind != "llvm" for module in (executable.mod, *executable.mod.imports)):
        # Nothing but shapes and constants: there is no code to compile.
        return executable.jit()

    def pack_imports(module: tvm.runtime.Module, _system_lib: bool, prefix: str, folder: str) -> str:
        # TVM takes unoptimised code for a system library's, which would be registered for good.
        host = next(one for one in module.imports if one.kind == "llvm")
        packed = _ffi_api.ModulePackImportsToLLVM(module, False, str(host.get_function("_get_target_string")()), prefix)
        path = Path(folder) / "imports.o"
        packed.write_to_file(str(path))
        return str(path)

    with temporary_folder() as folder:
        path = Path(folder) / "code.so"
        executable.export_library(
            str(path), fcompile=link_to_load, workspace_dir=str(folder), fpack_imports=pack_imports
        )
        return tvm.runtime.load_module(str(path))


class ReferenceKernels:
    """The PrimFuncs of a lowered module on the host, to check a module's kernels with or to put in their place."""

    def __init__(self, mod: tvm.ir.IRModule, host: tvm.target.Target, calls: Sequence[CallSite]) -> None:
        """Compile every PrimFunc of an unscheduled module, which a run calls as `calls` says."""
        functions = {str(var.name_hint): func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
        self._accepted = {
            name: kernel_tolerance(func) for name, func in functions.items() if untunable_reason(func) is None
        }
        named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
        ready, target = ready_for_host(tvm.IRModule(named), host, calls)
        with tvm.transform.PassContext(opt_level=3), target:
            self._code = load_code(tvm.compile(ready, target))

    def replacement(self, call: CallSite) -> Replacement:
        """Return a stand-in for a kernel: it computes on the host what the kernel would write on its device."""

        def run(*arguments: object) -> None:
            for tensor, array in zip(output_tensors(call, arguments), self.compute(call, arguments), strict=True):
                tensor.copyfrom(array)

        return run

    def compute(self, call: CallSite, arguments: Sequence[object]) -> list[np.ndarray]:
        """Return what the outputs of a call should be; its arguments stay as they are."""
        outputs = {id(tensor) for tensor in output_tensors(call, arguments)}
        given: list[object] = []
        results: list[Tensor] = []
        for argument in arguments:
            if not isinstance(argument, Tensor):
                given.append(argument)
                continue
            array = np.zeros(argument.shape, argument.numpy().dtype) if id(argument) in outputs else argument.numpy()
            tensor = tvm.runtime.tensor(array)
            given.append(tensor)
            if id(argument) in outputs:
                results.append(tensor)
        self._code[call.function](*given)
        return [result.numpy() for result in results]

    def find_fault(self, call: CallSite, arguments: Sequence[object]) -> str | None:
        """Return how what a kernel wrote differs from the reference on the same arguments; None within tolerance."""
        outputs = output_tensors(call, arguments)
        inputs = [a.numpy() for a in arguments if isinstance(a, Tensor) and not any(a is o for o in outputs)]
        if (accepted := self._accepted.get(call.function)) is None:
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            longest = max((int(size) for tensor in tensors for size in tensor.shape), default=1)
            accepted = symbolic_kernel_tolerance([str(tensor.dtype) for tensor in tensors], longest)
        accepted = _scaled(accepted, inputs)
        for tensor, expected in zip(outputs, self.compute(call, arguments), strict=True):
            mismatch = find_mismatch(tensor.numpy(), expected, accepted)
            if mismatch is not None:
                return mismatch
        return None


def _scaled(accepted: KernelTolerance, inputs: Sequence[np.ndarray]) -> KernelTolerance:
    """Return a kernel's tolerance for arguments larger than those it was made for.

    The error of sums of products grows with the products: with the sizes of the two largest operands.
    """
    sizes = sorted((_rms(array) / _UNIFORM_RMS for array in inputs if array.dtype.kind in "fV"), reverse=True)
    growth = max(1.0, math.prod(sizes[:2]))
    return replace(accepted, accumulated=accepted.accumulated * growth)


def _rms(array: np.ndarray) -> float:
    values = array.astype(np.float64)
    values = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
