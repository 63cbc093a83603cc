"""From the target text of the command line to a complete TVM target and the limits of that machine."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import tvm
from tvm.target import Target, codegen, list_tags

from relaxtune.schedules.errors import TargetError
from relaxtune.schedules.targets.capabilities import (
    Feature,
    capabilities_of,
    device_runs,
    native_arch,
    shared_bytes_everywhere,
    shared_bytes_on,
    without_suffix,
)
from relaxtune.schedules.targets.gpus import Gpu, find_gpu, get_gpu
from relaxtune.schedules.targets.host import (
    CacheSizes,
    cache_sizes,
    correct_features,
    is_vector_feature,
    physical_cores,
)

logger = logging.getLogger(__name__)

ACCEPTED_FORMS = (
    "auto (a GPU if there is one, else this CPU), llvm (this CPU), cuda (this machine's GPU), cuda:ARCH such as "
    "cuda:sm_90a, cuda:ARCH@GPU such as cuda:sm_89@L4 (the GPU that kernels are planned for), a TVM tag such as "
    'nvidia/geforce-rtx-3090, or JSON such as {"kind": "llvm", "mcpu": "znver4"}'
)

# Instructions of kernels for tiles: bfloat16 is cut from float32 in vectors. Linux gives a process tiles when it asks.
_TILES = frozenset({"amx-tile", "amx-bf16", "avx512bw"})

# Attribute of a CUDA target. It says how code is packed, not what code is made, so that records do not depend on it.
PORTABLE = "feature.portable"
# The GPU that untuned kernels are planned for, by its name in `schedules.targets.gpus`. Records say what they ran on.
PLANNED_FOR = "feature.gpu"
# Of a multiprocessor: threads. Of each block: shared memory that the driver takes. Registers are given out by so many.
_THREADS_MAX, _RESERVED_BYTES, _REGISTER_UNIT = 2048, 1024, 8


@dataclass(frozen=True)
class CpuLimits:
    """The resources of a core, and the number of cores; None where unknown.

    `has_tiles` says that a core multiplies tiles of bfloat16 (Intel AMX), which Linux allows; `has_byte_dot`, that it
    adds products of four pairs of bytes to an int32 in one step, in vectors of the width above (AVX-512 or AVX VNNI).
    """

    vector_bytes: int
    cores: int
    vector_registers: int
    l1_bytes: int | None = None
    l2_bytes: int | None = None
    has_tiles: bool = False
    has_byte_dot: bool = False


@dataclass(frozen=True)
class CudaLimits:
    """The resources of a thread block, and the multiprocessors: `sm_count` if known, else a likely GPU's.

    All but the opt-in and the multiprocessors is the same for every architecture. `gpu` is the one that the target
    names, this machine's where it runs the target's code, or a usual one of the architecture; None where its clock and
    bandwidth are not known.
    """

    shared_bytes_optin: int
    usual_sm_count: int
    shared_bytes_static: int = 48 * 1024
    max_threads_per_block: int = 1024
    registers_per_block: int = 65536
    registers_per_thread: int = 255
    warp_size: int = 32
    sm_count: int | None = None
    gpu: Gpu | None = None

    @property
    def likely_sm_count(self) -> int:
        """Multiprocessors: those of a usual GPU of the architecture where they are not known."""
        return self.sm_count or self.usual_sm_count

    def resident_blocks(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return how many blocks a multiprocessor holds at a time; `registers` are those of a thread."""
        given = math.ceil(registers / _REGISTER_UNIT) * _REGISTER_UNIT
        by_memory = (self.shared_bytes_optin + _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)
        return max(1, min(by_memory, self.registers_per_block // (given * threads), _THREADS_MAX // threads))


TargetLimits = CpuLimits | CudaLimits


@dataclass(frozen=True)
class ResolvedTarget:
    """A complete target."""

    target: Target  # With its host set.
    source: str  # How it was found, for logs and reports.
    kind: str  # `llvm` or `cuda`.
    arch: str  # The CPU name as LLVM calls it, or the GPU architecture such as `sm_90a`.
    limits: TargetLimits  # The resources that schedules may use.

    # Asked for with every kernel whose time is predicted.
    @cached_property
    def features(self) -> frozenset[Feature]:
        """The features of the GPU; none for a CPU."""
        return target_features(self.target)

    @property
    def portable(self) -> bool:
        """Whether PTX is kept beside the machine code, which the driver of a newer GPU translates."""
        return is_portable(self.target)


def is_portable(target: Target) -> bool:
    """Whether a target asks for PTX beside the machine code."""
    return bool(target.attrs.get(PORTABLE, False))


def resolve_target(text: str = "auto", *, portable: bool = False) -> ResolvedTarget:
    """Return the complete target that a text means on this machine.

    `text`: one of the forms in `ACCEPTED_FORMS`.
    `portable`: whether PTX is kept beside the machine code; a target given as JSON may ask for it too (`PORTABLE`).
    Raises `TargetError`: the text has none of the accepted forms, names an unknown kind or processor, or asks for a GPU
    without saying which on a machine that has none; or PTX is asked for, and that of the target runs on no other GPU.
    """
    resolved = _resolve(text.strip())
    if not (portable or resolved.portable):
        return resolved
    if resolved.kind != "cuda":
        raise TargetError(f"--portable keeps PTX for newer GPUs, and {text!r} is no GPU; leave it out, or name a GPU")
    moving = without_suffix(resolved.arch)
    if moving != resolved.arch:
        raise TargetError(
            f"--portable: code for {resolved.arch} has instructions of this GPU alone, so its PTX runs on no other; "
            f"compile with --target cuda:{moving}, whose kernels do without them"
        )
    config = {**json.loads(str(resolved.target)), PORTABLE: True}
    # A newer GPU of this machine runs it, too.
    return replace(resolved, target=Target(config), limits=_limits_for(resolved.arch, config))


def _resolve(text: str) -> ResolvedTarget:
    if text == "auto":
        resolved = _resolve_local_cuda("auto") if tvm.cuda(0).exist else _resolve_local_cpu("auto")
    elif text == "llvm":
        resolved = _resolve_local_cpu("llvm")
    elif text == "cuda":
        resolved = _resolve_local_cuda("cuda")
    elif text.startswith("cuda:"):
        arch, _, gpu = text.removeprefix("cuda:").partition("@")
        named: dict[str, object] = {PLANNED_FOR: get_gpu(gpu).name} if "@" in text else {}
        resolved = _cuda_resolved(arch, f"given as {text}", _host_target(), named)
    elif text.startswith("{"):
        try:
            config: dict[str, object] = json.loads(text)
        except json.JSONDecodeError as error:
            raise TargetError(f"target {text!r} is not valid JSON ({error}). Accepted: {ACCEPTED_FORMS}.") from error
        resolved = _resolve_config(config, "given as JSON")
    elif text in list_tags():
        resolved = _resolve_config(json.loads(str(list_tags()[text])), f"TVM tag {text}")
    else:
        raise TargetError(f"target {text!r} is not known. Accepted: {ACCEPTED_FORMS}.")
    logger.debug("target %s %s: %s; limits %s", resolved.kind, resolved.arch, resolved.source, resolved.limits)
    return resolved


def target_limits(target: Target) -> TargetLimits:
    """Return the limits of a target that was not made by `resolve_target` (no GPU is asked).

    Raises `TargetError`: the target is neither `llvm` nor `cuda`, or its CUDA architecture is not in the table.
    """
    if target.kind.name == "llvm":
        return _cpu_limits(target)
    if target.kind.name == "cuda":
        return _limits_elsewhere(str(target.attrs["arch"]), dict(target.attrs))
    raise TargetError(f"target kind {target.kind.name!r} is not supported; expected llvm or cuda.")


def target_features(target: Target) -> frozenset[Feature]:
    """Return what a target's GPU can do beyond the least; nothing for a CPU.

    Raises `TargetError`: the CUDA architecture is not in the table.
    """
    return capabilities_of(str(target.attrs["arch"])).features if target.kind.name == "cuda" else frozenset()


def vector_features(target: Target) -> set[str]:
    """Return the instruction sets of an LLVM target that compiled code may use without asking."""
    return {str(name) for name in codegen.llvm_get_cpu_features(target) if is_vector_feature(str(name))}


def _resolve_local_cpu(text: str) -> ResolvedTarget:
    target = _host_target()
    corrections = ", ".join(map(str, target.attrs.get("mattr", ())))
    corrected = f", {corrections} by /proc/cpuinfo" if corrections else ""
    source = f"{text}: this machine's processor, as LLVM names it{corrected}; cores by CPU affinity and quota"
    cpu = str(target.attrs["mcpu"])
    return ResolvedTarget(Target(target, host=target), source, "llvm", cpu, _cpu_limits(target))


def _host_target() -> Target:
    config: dict[str, object] = {
        "kind": "llvm",
        "mtriple": str(codegen.llvm_get_system_triple()),
        "mcpu": str(codegen.llvm_get_system_cpu()),
        "num-cores": physical_cores(),
    }
    corrections = correct_features(vector_features(Target(config)))
    return Target({**config, "mattr": corrections} if corrections else config)


def _resolve_local_cuda(text: str) -> ResolvedTarget:
    device = tvm.cuda(0)
    if not device.exist:
        raise TargetError(
            f"target {text!r}: this machine has no CUDA device (or no driver), so the architecture must be given, "
            "for example cuda:sm_90a."
        )
    arch = native_arch(str(device.compute_version))
    source = f"{text}: compute capability {device.compute_version} of {device.device_name}"
    return _cuda_resolved(arch, source, _host_target(), {})


def _resolve_config(config: dict[str, object], source: str) -> ResolvedTarget:
    kind = config.get("kind")
    if "tag" in config and kind is None:
        tag = str(config["tag"])
        if tag not in list_tags():
            raise TargetError(f"target tag {tag!r} is not known to this TVM. Accepted: {ACCEPTED_FORMS}.")
        base = json.loads(str(list_tags()[tag]))
        return _resolve_config({**base, **config, "kind": base["kind"]}, source)
    if kind not in ("llvm", "cuda"):
        raise TargetError(f"target {source}: kind {kind!r} is not supported; expected llvm or cuda.")
    host_config = config.get("host")
    host = _make_target(host_config, source) if isinstance(host_config, dict) else None
    own = {key: value for key, value in config.items() if key not in ("host", "tag")}
    if kind == "cuda":
        if "arch" not in config:
            raise TargetError(f'target {source}: a cuda target needs its architecture, for example "arch": "sm_90a".')
        arch = str(config["arch"])
        return _cuda_resolved(arch, source, host or _host_target(), own)
    target = _make_target(own, source)
    cpu = str(target.attrs.get("mcpu", "generic"))
    triple = str(target.attrs.get("mtriple", codegen.llvm_get_system_triple()))
    if cpu != "generic" and not codegen.llvm_is_valid_cpu(cpu, triple):
        raise TargetError(
            f"target {source}: LLVM does not know the processor {cpu!r} for {triple}; this machine's is "
            f"{codegen.llvm_get_system_cpu()!r}."
        )
    return ResolvedTarget(Target(target, host=host or target), source, "llvm", cpu, _cpu_limits(target))


def _cuda_resolved(arch: str, source: str, host: Target, extra: dict[str, object]) -> ResolvedTarget:
    limits = _limits_for(arch, extra)
    config: dict[str, object] = {
        "kind": "cuda",
        "arch": arch,
        # dlight and MetaSchedule emit static `shared` buffers, which the opt-in limit does not cover.
        "max_shared_memory_per_block": limits.shared_bytes_static,
        "max_threads_per_block": limits.max_threads_per_block,
        "registers_per_block": limits.registers_per_block,
        "thread_warp_size": limits.warp_size,
        **extra,
    }
    return ResolvedTarget(Target(_make_target(config, source), host=host), source, "cuda", arch, limits)


def _limits_for(arch: str, config: Mapping[str, object]) -> CudaLimits:
    """Return the limits of the GPU that a target is planned for: the one it names, this machine's, or a usual one."""
    device = tvm.cuda(0)
    named, portable = config.get(PLANNED_FOR), bool(config.get(PORTABLE, False))
    if named is not None or not device.exist:
        return _limits_elsewhere(arch, config)
    version = str(device.compute_version)
    if not device_runs(arch, version, portable=portable):
        return _limits_elsewhere(arch, config)
    usual = _limits_elsewhere(arch, {})
    gpu = find_gpu(str(device.device_name)) or usual.gpu
    shared = shared_bytes_on(arch, version)
    return replace(usual, shared_bytes_optin=shared, sm_count=int(device.multi_processor_count), gpu=gpu)


def _limits_elsewhere(arch: str, config: Mapping[str, object]) -> CudaLimits:
    """Return the limits of an architecture's code on the GPU that a target names, or on a usual one.

    Kernels for every newer GPU take the shared memory that all of them have.
    """
    offered, name = capabilities_of(arch), config.get(PLANNED_FOR)
    usual = CudaLimits(offered.shared_bytes_optin, offered.multiprocessors, gpu=offered.gpu)
    if name is None:
        return replace(usual, shared_bytes_optin=shared_bytes_everywhere(arch)) if config.get(PORTABLE) else usual
    gpu = get_gpu(str(name))
    if not device_runs(arch, gpu.compute, portable=True):
        raise TargetError(
            f"code for {arch} does not run on {gpu.name}, whose compute capability is {gpu.compute}; "
            f"name another GPU, or cuda:{native_arch(gpu.compute)}."
        )
    shared = shared_bytes_on(arch, gpu.compute)
    return replace(usual, shared_bytes_optin=shared, sm_count=gpu.multiprocessors, gpu=gpu)


def _cpu_limits(target: Target) -> CpuLimits:
    features = codegen.llvm_get_cpu_features(target)
    arm = "neon" in features or "sve" in features
    local = str(target.attrs.get("mcpu", "")) == str(codegen.llvm_get_system_cpu())
    caches = cache_sizes() if local else CacheSizes()
    # By an x86's features, since TVM calls all of them 512 bits wide. LLVM's -1 is "unknown"; every target that runs
    # transformers has 16-byte vectors.
    width = max(16, int(codegen.llvm_get_vector_width(target)) // 8)
    if "sse2" in features:
        width = 64 if "avx512f" in features else 32 if "avx2" in features else 16
    linux = "linux" in str(target.attrs.get("mtriple", codegen.llvm_get_system_triple()))
    return CpuLimits(
        vector_bytes=width,
        cores=int(target.attrs.get("num-cores", physical_cores() if local else 1)),
        # Intel SDM volume 1, 15.1.2: ZMM0-31 with AVX-512, else 16; Arm ARM C1.2.5: V0-31.
        vector_registers=32 if arm or "avx512f" in features else 16,
        l1_bytes=caches.l1_bytes,
        l2_bytes=caches.l2_bytes,
        has_tiles=linux and all(name in features for name in _TILES),
        has_byte_dot=("avx512vnni" if width == 64 else "avxvnni") in features,
    )


def _make_target(config: dict[str, object], source: str) -> Target:
    try:
        return Target(config)
    except ValueError as error:
        reason = str(error).strip().splitlines()[-1]
        raise TargetError(f"target {source}: TVM does not take {json.dumps(config)}: {reason}") from error


def portable_host(target: ResolvedTarget) -> ResolvedTarget:
    """Return a GPU target whose host code runs on any processor of its kind, not on this machine's only.

    The host code of a GPU module packs arguments and launches kernels; a module compiled here is to run beside another
    machine's GPU. A host that was chosen otherwise than by detection, and any CPU target, stays as it is.
    """
    host = target.target.host
    detected = host is not None and str(host.attrs.get("mcpu", "")) == str(codegen.llvm_get_system_cpu())
    if target.kind != "cuda" or not detected:
        return target
    generic = Target({"kind": "llvm", "mtriple": str(host.attrs["mtriple"])})
    return replace(target, target=Target(target.target, host=generic))
