"""From a lowered module and the kernels picked for it to code: schedule, plan memory, generate code."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import tvm
from tvm import relax, tirx
from tvm.relax.utils import copy_with_new_vars
from tvm.target import codegen
from tvm_ffi import structural_equal

from relaxtune.pipeline.artifact.determinism import describe_determinism
from relaxtune.pipeline.artifact.device_choice import missing_features
from relaxtune.pipeline.artifact.entries import DeterminismEntry
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.codegen.cuda_graph import (
    capture_whole_function,
    computes_sizes,
    fix_output_memory,
    with_whole_calls,
    without_dependent_launch,
)
from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels, pass_context
from relaxtune.pipeline.codegen.kernel_hash import kernel_hash
from relaxtune.pipeline.codegen.planned_memory import calling, planned_bytes, with_maxima, with_sizes_in_order
from relaxtune.pipeline.codegen.token_list import with_token_list
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes import plan_memory_passes
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.printable import last_line
from relaxtune.schedules.errors import UnscheduledError
from relaxtune.schedules.fallback import apply_fallback, apply_plainest
from relaxtune.schedules.gpu.binding import count_launches
from relaxtune.schedules.targets import ResolvedTarget, portable_host
from relaxtune.schedules.targets.resolve import vector_features
from relaxtune.schedules.templates.lowering import tir_pipeline_for
from relaxtune.tuning_db.records import Route

logger = logging.getLogger(__name__)


def plain_instead(
    lowered: LoweredModule,
    choices: Sequence[KernelChoice],
    target: ResolvedTarget,
    said: str,
    before: Collection[str] = (),
) -> list[KernelChoice]:
    """Return choices of the plainest schedule for the kernels that the compiler refused; none where that is no remedy.

    Where the compiler's error, `said`, names no kernel, each is compiled alone. Functions `before` are plain already.
    """
    others = [name for name in lowered.kernels if name not in before]
    refused = {name: last_line(said) for name in others if re.search(rf"\b{re.escape(name)}_kernel(_\d+)?\b", said)}
    if not refused:
        made = {choice.function: choice.scheduled for choice in choices}
        functions = {name: made.get(name) or lowered.mod[name] for name in others}
        refused = {name: error for name, func in functions.items() if (error := _refusal(func, target))}
    tasks = {choice.function: choice.task for choice in choices}
    found = []
    for name, error in refused.items():
        try:
            plain = apply_plainest(name, lowered.mod[name], target.target)
        except UnscheduledError:
            continue
        if _refusal(plain, target) is None:
            note = f"its own schedule did not compile, so it takes the plain default, which is slow: {error}"
            logger.warning("kernel %s: %s", name, note)
            found.append(KernelChoice(name, tasks.get(name), Route.FALLBACK, note=note, scheduled=plain))
    return found


def _refusal(func: tirx.PrimFunc, target: ResolvedTarget) -> str | None:
    """Return why a kernel does not compile alone, None where it does; without a schedule, it takes the default one."""
    try:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        mod = finish_kernels(apply_fallback(mod, target.target), target.target)
        with device_toolchain(target.target), tvm.transform.PassContext(opt_level=3), target.target:
            tvm.compile(mod, target.target, tir_pipeline=tir_pipeline_for(mod))
    except (LoweringError, *TVM_ERRORS) as e:
        return last_line(str(e))
    return None


class _CodeError(LoweringError):
    """Code generation refused a module, perhaps for one of its kernels."""


@dataclass(frozen=True)
class CompiledModule:
    """A module compiled in memory, with what it was made of."""

    # The inputs of the compilation.
    lowered: LoweredModule
    choices: tuple[KernelChoice, ...]
    target: ResolvedTarget
    executable: relax.VMExecutable  # TVM's executable; `pipeline.artifact.export.write_artifact` writes it.
    cuda_graph: bool  # Whether the kernels run as one captured CUDA graph.
    seconds: Mapping[str, float]  # Phase of the compilation -> seconds.
    planned_bytes: int | None = None  # Storage of the static memory plan; None when it depends on the inputs' shapes.
    # PrimFunc -> kernels that one call of it launches on a GPU; empty for a CPU.
    launches: Mapping[str, int] = field(default_factory=dict)
    # PrimFunc -> the hash of its code (`pipeline.codegen.kernel_hash`).
    kernel_hashes: Mapping[str, str] = field(default_factory=dict)
    determinism: DeterminismEntry | None = None  # Its promise about equal bits.
    variants: tuple[tuple[KernelChoice, ...], ...] = ()  # The choices of the entries beside `main`.

    def is_code_of(self, lowered: LoweredModule, kernel_hashes: Mapping[str, str]) -> bool:
        """Whether this is the code of a lowered module whose kernels have these hashes."""
        same = lowered is self.lowered or structural_equal(lowered.mod, self.lowered.mod)
        return same and kernel_hashes == self.kernel_hashes


def compile_module(
    lowered: LoweredModule,
    choices: Sequence[KernelChoice],
    target: ResolvedTarget,
    *,
    cuda_graph: bool = True,
    variants: Sequence[Sequence[KernelChoice]] = (),
    like: CompiledModule | None = None,
) -> CompiledModule:
    """Return the compiled module.

    `lowered`: unscheduled.
    `choices`: from `select_kernels`; a PrimFunc without a choice takes the fallback.
    `target`: what to generate code for; a CUDA target needs a compiler toolchain and no GPU.
    `cuda_graph`: on CUDA, whether the kernels of a module with static shapes run as one captured graph. It then reads
    its inputs at fixed addresses, and its outputs stay valid until the next run. None is made of a module that computes
    sizes.
    `variants`: other choices of some functions each; every variant is an entry of its own
    (`pipeline.artifact.compile`).
    `like`: the model with other choices. If these make the same kernels, its code is taken.
    Raises `LoweringError`: code generation refused the module, and not for kernels that a plain schedule is a remedy
    for; or the CUDA toolchain is missing.
    """
    plain: dict[str, KernelChoice] = {}
    while True:
        try:
            return _compiled(lowered, choices, target, cuda_graph, variants, like)
        except _CodeError as e:
            found = {one.function: one for one in plain_instead(lowered, choices, target, str(e), plain)}
            if not found:
                raise
            plain |= found
            choices = [*(choice for choice in choices if choice.function not in found), *found.values()]


def _compiled(
    lowered: LoweredModule,
    choices: Sequence[KernelChoice],
    target: ResolvedTarget,
    cuda_graph: bool,
    variants: Sequence[Sequence[KernelChoice]],
    like: CompiledModule | None,
) -> CompiledModule:
    target = portable_host(target)
    seconds: dict[str, float] = {}
    with _timed(seconds, "schedule"):
        graph = cuda_graph and target.kind == "cuda" and not computes_sizes(lowered.mod)
        mod = with_variants(apply_choices(lowered.mod, choices), variants, lowered.mod)
        mod = with_maxima(mod, lowered.maxima)
        if graph:
            mod = capture_whole_function(mod, lowered.input_count)
        mod = with_token_list(mod, lowered)
        mod = apply_fallback(mod, target.target)
        determinism = describe_determinism({name: mod[name] for name in lowered.kernels}, choices, target)
        mod = finish_kernels(mod, target.target)
        hashes = {name: kernel_hash(mod[name], target.kind) for name in lowered.kernels}
        if like is not None and not variants and like.is_code_of(lowered, hashes):
            return replace(like, lowered=lowered, choices=tuple(choices))
        if not graph:
            mod = without_dependent_launch(mod)
        on_gpu = lowered.kernels if target.kind == "cuda" else ()
        launches = {name: count_launches(mod[name]) for name in on_gpu}
    with _timed(seconds, "plan_memory"), pass_context(graph), target.target:
        mod, planned = _plan_memory(mod, target, graph, lowered.graph.name)
    with _timed(seconds, "codegen"), device_toolchain(target.target), pass_context(graph), target.target:
        try:
            executable = relax.build(mod, target.target, relax_pipeline=None, tir_pipeline=tir_pipeline_for(mod))
        except TVM_ERRORS as e:
            what = f"{lowered.graph.name} for {target.kind} {target.arch}"
            raise _CodeError(f"code generation of {what} failed: {e}") from e
    return CompiledModule(
        lowered,
        tuple(choices),
        target,
        executable,
        graph,
        seconds,
        planned,
        launches,
        hashes,
        determinism,
        tuple(map(tuple, variants)),
    )


def entry_of(number: int) -> str:
    """Return the name of the function that runs a variant, counted from 0."""
    return f"main_{number}"


def with_variants(
    mod: tvm.ir.IRModule, variants: Sequence[Sequence[KernelChoice]], unscheduled: tvm.ir.IRModule
) -> tvm.ir.IRModule:
    """Return the module with an entry for each variant: `main` with some of its kernels made in another way.

    Different kernels are compiled, and the rest shared: comparing a dozen kernels inside a model takes one compilation,
    one copy of the weights, and the time of the kernels that are new.

    A variant is the choices in which it differs; they keep the names of `main`'s functions, which are scheduled as they
    were chosen for it. A choice of the fallback starts from the function as it is `unscheduled`.

    Raises `ValueError`: a choice is of a function that the module does not have.
    """
    builder = relax.BlockBuilder(mod)
    for number, variant in enumerate(variants):
        others = {}
        for choice in variant:
            old = mod.get_global_var(choice.function)
            made = choice.scheduled if choice.scheduled is not None else unscheduled[choice.function]
            others[old] = builder.add_func(made, f"{choice.function}_{entry_of(number)}")
        entry = copy_with_new_vars(calling(mod["main"], others))
        builder.add_func(entry.with_attr("global_symbol", entry_of(number)), entry_of(number))
    return builder.get()


def apply_choices(mod: tvm.ir.IRModule, choices: Sequence[KernelChoice]) -> tvm.ir.IRModule:
    """Return the module with the PrimFuncs of the choices replaced by their scheduled form."""
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for choice in choices:
        if choice.scheduled is not None:
            result[result.get_global_var(choice.function)] = choice.scheduled
    return result


def check_plan(lowered: LoweredModule, target: ResolvedTarget) -> None:
    """Check that the memory and the sizes of a module can be planned, without code for its kernels.

    Raises `LoweringError`: they cannot: compiling the module would end with this error.
    """
    target = portable_host(target)
    with pass_context(False), target.target:
        _plan_memory(with_maxima(lowered.mod, lowered.maxima), target, False, lowered.graph.name)


def _plan_memory(
    mod: tvm.ir.IRModule, target: ResolvedTarget, graph: bool, name: str
) -> tuple[tvm.ir.IRModule, int | None]:
    """Return the module with explicit memory, and the bytes that it takes, where they are known."""
    passes = plan_memory_passes(target.target, graph)
    if graph:
        position = [str(one.info.name) for one in passes].index("RewriteCUDAGraph")
        fix = tvm.transform.module_pass(
            lambda planned, _: fix_output_memory(planned), opt_level=0, name="FixOutputMemory"
        )
        whole = tvm.transform.module_pass(lambda lifted, _: with_whole_calls(lifted), opt_level=0, name="WholeCalls")
        passes[position : position + 1] = [fix, passes[position], whole]
    shapes = [str(one.info.name) for one in passes].index("VMShapeLower")
    try:
        mod = tvm.transform.Sequential(passes[:shapes])(mod)
        sizes = with_sizes_in_order(passes[shapes](mod))
        return tvm.transform.Sequential(passes[shapes + 1 :])(sizes), planned_bytes(mod)
    except TVM_ERRORS as e:
        raise LoweringError(f"memory of {name} for {target.kind} {target.arch} cannot be planned: {e}") from e


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started


def runs_here(target: ResolvedTarget) -> bool:
    """Whether this machine runs what is compiled for a target, so that it can be checked.

    A processor runs code for all that have no more instruction sets. Measuring needs the device itself.
    """
    if target.kind == "cuda":
        return detect_environment(target).device_name != UNKNOWN_DEVICE
    here = str(codegen.llvm_get_system_triple())
    machines = {triple.partition("-")[0] for triple in (here, str(target.target.attrs.get("mtriple", here)))}
    return len(machines) == 1 and not missing_features(vector_features(target.target))
