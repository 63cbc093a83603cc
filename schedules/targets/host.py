"""The processor of the machine: cores that this process may use, caches, instruction sets.

Read from Linux's /sys and /proc; where those files do not exist, the answer is None (unknown), never a guess.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SYS_CPU = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")
CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")

# LLVM's names of what schedules are made for. A hypervisor may name another CPU, which promises less than there is.
_WANTED = frozenset(
    {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "amx-tile", "amx-bf16"}
)
# Flags of /proc/cpuinfo that LLVM calls otherwise, both without dots, dashes and underscores.
_OTHER_NAMES = {"pni": "sse3", "abm": "lzcnt", "bmi1": "bmi"}
# Instructions that LLVM emits by itself. Tuning hints ("fast-...") and system instructions are no reason to refuse a
# machine.
_VECTOR_FEATURE = re.compile("(sse|ssse|avx|fma|f16c|bmi|lzcnt|popcnt|movbe|amx|neon|sve|dotprod|fullfp16|i8mm|bf16).*")


@dataclass(frozen=True)
class CacheSizes:
    """Data cache sizes of one core in bytes; None where the system does not tell."""

    l1_bytes: int | None = None
    l2_bytes: int | None = None


def usable_cpus() -> list[int]:
    """Return the numbers of the logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(sys_cpu: Path = SYS_CPU, cgroups: Path = CGROUPS, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Count the physical cores among the usable CPUs, not more than the control group's CPU quota.

    `pipeline/codegen/cpu_threads.c` counts in the same way where no Python runs.

    Two hardware threads of one core share its vector units, so a second thread gains next to nothing in a matmul.
    """
    cpus = usable_cpus()
    cores = set()
    for cpu in cpus:
        topology = sys_cpu / f"cpu{cpu}" / "topology"
        core, package = _read(topology / "core_id"), _read(topology / "physical_package_id")
        cores.add((package, core) if core is not None else (None, str(cpu)))
    quota = _cgroup_quota(cgroups, cgroup_root)
    return max(1, min(len(cores), quota or len(cores)))


def cache_sizes(sys_cpu: Path = SYS_CPU) -> CacheSizes:
    """Return the data cache sizes of the first usable CPU."""
    sizes: dict[int, int] = {}
    for index in sorted((sys_cpu / f"cpu{usable_cpus()[0]}" / "cache").glob("index*")):
        level, kind, size = _read(index / "level"), _read(index / "type"), _read(index / "size")
        if level is not None and size is not None and kind != "Instruction":
            factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1].upper())  # 32K, 1M
            sizes[int(level)] = int(size[:-1]) * factor if factor else int(size)
    return CacheSizes(sizes.get(1), sizes.get(2))


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str] | None:
    """Return the instruction-set flags that the kernel reports, or None when it reports none (not x86 Linux)."""
    for line in (_read(cpuinfo) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return None


def is_vector_feature(name: str) -> bool:
    """Whether an instruction set, by LLVM's name, is one that compiled code may use without asking."""
    return _VECTOR_FEATURE.fullmatch(name) is not None


def plain_feature(name: str) -> str:
    """Return one name for what LLVM and the kernel call an instruction set."""
    plain = re.sub("[._-]", "", name)
    return _OTHER_NAMES.get(plain, plain)


def cpu_features() -> frozenset[str] | None:
    """Return what the processor has, by `plain_feature`; None where the kernel does not tell (not x86 Linux)."""
    flags = cpu_flags()
    return None if flags is None else frozenset(map(plain_feature, flags))


def correct_features(promised: Set[str]) -> list[str]:
    """Return what the kernel knows better than LLVM by the processor's name: "-fma" is not there, "+amx-tile" is.

    A hypervisor may hide units that the processor's name promises, and code for a hidden unit dies of SIGILL.
    """
    here = cpu_features()
    if here is None:
        return []
    hidden = sorted(name for name in promised if plain_feature(name) not in here)
    added = sorted(name for name in _WANTED - promised if plain_feature(name) in here)
    return [f"-{name}" for name in hidden] + [f"+{name}" for name in added]


def _cgroup_quota(cgroups: Path, root: Path) -> int | None:
    """Return the whole CPUs that the process's control group and those around it allow, None for no limit."""
    quotas = []
    for line in (_read(cgroups) or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container may see the host's path and have its own group at the root: all folders up to that are looked at.
        path = PurePosixPath(group.lstrip("/"))
        quotas += [_quota_in(root / controllers / folder) for folder in (path, *path.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_in(group: Path) -> int | None:
    """Return the whole CPUs that one control group allows, by the files of version 2 or 1; None for no limit."""
    fields = (_read(group / "cpu.max") or "").split()
    if not fields:
        fields = [_read(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if len(fields) != 2 or not all(field.isdecimal() and int(field) for field in fields):
        return None
    return math.ceil(int(fields[0]) / int(fields[1]))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
