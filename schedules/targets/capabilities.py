"""The features of each CUDA architecture: one table, which templates, passes, the search and code generation ask.

A new architecture is a row of `_ROWS`. Nothing outside this folder compares or takes apart the name of an architecture.

Sources: shared memory from CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability", row
"Maximum amount of shared memory per thread block"; instructions from PTX ISA 9.0, "Target ISA Notes" of each;
multiprocessors of GPUs that `gpus.py` lacks from NVIDIA's architecture white papers and data sheets. CUDA 13 compiles
for nothing older than sm_75.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from relaxtune.schedules.errors import TargetError
from relaxtune.schedules.targets.gpus import A10, A100, H200, L40S, RTX_5090, Gpu


class Feature(Enum):
    """Something that a GPU can do; the value is its name in messages."""

    LDMATRIX = "ldmatrix"
    #: Of halves as m16n8k16, of float32 in tf32 as m16n8k8.
    MMA = "mma.m16n8k16"
    CP_ASYNC = "cp.async"
    MMA_FLOAT8 = "mma of float8"
    #: Tensor cores that a warp multiplies float8 by. Without them the compiler makes its `mma` of halves and float32
    #: additions (ptxas 13.5: QMMA for sm_89, sm_120 and sm_121, HMMA for sm_90 to sm_110).
    FLOAT8_CORES = "tensor cores of float8 for a warp"
    #: Kernels that start before the one before them has ended.
    DEPENDENT_LAUNCH = "dependent launch"
    CLUSTERS = "clusters"
    TMA = "TMA"
    #: Multiplications by a warpgroup; code with them runs on one compute capability alone (suffix `a`).
    WGMMA = "wgmma"


_TURING = frozenset({Feature.LDMATRIX})
_AMPERE = _TURING | {Feature.MMA, Feature.CP_ASYNC}
_ADA = _AMPERE | {Feature.MMA_FLOAT8}
_CORES = frozenset({Feature.FLOAT8_CORES})
_HOPPER = _ADA | {Feature.DEPENDENT_LAUNCH, Feature.CLUSTERS, Feature.TMA}


@dataclass(frozen=True)
class Capabilities:
    """Shared memory that a block may opt in to, in KiB; a usual GPU; features of `sm_N`, of `sm_Na` besides.

    Of a GPU that is not in the table of GPUs, `usual` is the multiprocessors alone.
    """

    optin_kib: int
    usual: Gpu | int
    features: frozenset[Feature]
    exact: frozenset[Feature] = frozenset()

    @property
    def shared_bytes_optin(self) -> int:
        """Bytes of shared memory that a block may opt in to."""
        return self.optin_kib * 1024

    @property
    def gpu(self) -> Gpu | None:
        """A usual GPU; None where no more than its multiprocessors is known."""
        return self.usual if isinstance(self.usual, Gpu) else None

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of a usual GPU."""
        return self.usual.multiprocessors if isinstance(self.usual, Gpu) else self.usual


# The GPU named is assumed where the target is not this machine's own.
_ROWS = {
    75: Capabilities(64, 40, _TURING),  # T4
    80: Capabilities(163, A100, _AMPERE),
    86: Capabilities(99, A10, _AMPERE),
    87: Capabilities(163, 16, _AMPERE),  # Jetson AGX Orin
    88: Capabilities(99, 16, _AMPERE),  # as Orin
    89: Capabilities(99, L40S, _ADA | _CORES),
    90: Capabilities(227, H200, _HOPPER, frozenset({Feature.WGMMA})),
    100: Capabilities(227, 148, _HOPPER),  # B200
    103: Capabilities(227, 148, _HOPPER),  # as B200
    110: Capabilities(227, 20, _HOPPER),  # Jetson Thor
    120: Capabilities(99, RTX_5090, _HOPPER | _CORES),
    121: Capabilities(99, 48, _HOPPER | _CORES),  # GB10
}
# From here on the native code of a device has the suffix `a`.
_EXACT_FROM = 90


def capabilities_of(arch: str) -> Capabilities:
    """Return what an architecture such as `sm_90a` offers.

    Raises `TargetError`: the architecture is not in the table.
    """
    number, suffix = _parts(arch)
    row = _ROWS.get(number)
    if row is None:
        known = ", ".join(f"sm_{known}" for known in _ROWS)
        raise TargetError(f"CUDA architecture {arch!r} is not known; expected one of {known} (a suffix `a` is kept).")
    return replace(row, features=row.features | row.exact) if suffix == "a" else row


def lowest_with(*features: Feature) -> str:
    """Return the lowest architecture with some features, as messages name it: `sm_80 or later`, `sm_90a`."""
    for number, row in _ROWS.items():
        if row.features.issuperset(features):
            return f"sm_{number} or later"
        if (row.features | row.exact).issuperset(features):
            return f"sm_{number}a"
    raise ValueError(f"no architecture has {features}")


def native_arch(compute_version: str) -> str:
    """Return the architecture of a device by its compute capability, such as 9.0; the suffix `a` unlocks wgmma."""
    number = _number_of(compute_version)
    return f"sm_{number}{'a' if number >= _EXACT_FROM else ''}"


def is_of(arch: str, compute_version: str) -> bool:
    """Whether devices of a compute capability have an architecture, whatever its suffix."""
    return _parts(arch)[0] == _number_of(compute_version)


def runs_on(arch: str, compute_version: str) -> bool:
    """Whether machine code for an architecture runs on a device of a compute capability.

    It does on that one and on later minor versions of the same major one, with the suffix `a` on exactly that one
    (CUDA C++ Programming Guide 13.0, "Binary Compatibility").
    """
    (number, suffix), device = _parts(arch), _number_of(compute_version)
    return device == number if suffix == "a" else device // 10 == number // 10 and device >= number


def translates_to(arch: str, compute_version: str) -> bool:
    """Whether a driver makes machine code for a device of the PTX of an architecture that has no suffix.

    It does for that compute capability and for every later one (the same guide, "PTX Compatibility").
    """
    return _number_of(compute_version) >= _parts(arch)[0]


def device_runs(arch: str, compute_version: str, *, portable: bool) -> bool:
    """Whether a device of a compute capability runs an artifact for an architecture, by its PTX where it has that."""
    if is_of(arch, compute_version) or runs_on(arch, compute_version):
        return True
    return portable and translates_to(arch, compute_version)


def shared_bytes_on(arch: str, compute_version: str) -> int:
    """Return the shared memory that a block of an architecture's code may opt in to on a device."""
    own = capabilities_of(arch).shared_bytes_optin
    row = _ROWS.get(_number_of(compute_version))
    return own if row is None else min(own, row.shared_bytes_optin)


def shared_bytes_everywhere(arch: str) -> int:
    """Return the shared memory that a block may opt in to on every device that translates an architecture's PTX."""
    number, _ = _parts(arch)
    return min(row.shared_bytes_optin for known, row in _ROWS.items() if known >= number)


def virtual_arch(arch: str) -> str:
    """Return what CUDA's compilers call the PTX of an architecture without a suffix, such as `compute_80`."""
    return f"compute_{_parts(arch)[0]}"


def without_suffix(arch: str) -> str:
    """Return the architecture whose PTX runs on later ones, too: `sm_90` of `sm_90a`."""
    return f"sm_{_parts(arch)[0]}"


def _number_of(compute_version: str) -> int:
    return int(compute_version.replace(".", ""))


def _parts(arch: str) -> tuple[int, str]:
    """Return the number and the suffix of an architecture's name; 0 where it is none."""
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch)
    return (int(match.group(1)), match.group(2)) if match else (0, "")
