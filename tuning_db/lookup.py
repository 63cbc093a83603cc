"""The rules that say where a record is true. Nothing else in the package decides it.

A record answers a lookup when it is `ok`, its target matches, and the rule of its route holds:

=============  ==================================  ====================================================
route          found by                            also needs
=============  ==================================  ====================================================
metaschedule   workload hash                       the same TVM version: traces and hashes belong to one
fallback       workload hash                       the same TVM version
template       signature                           nothing: parameters of a kernel of ours
library        signature                           nothing: parameters of a vendor primitive
=============  ==================================  ====================================================

A decision may make another kernel than the one measured, once the code that makes it has changed. A fallback has
nothing but that code. Who makes kernels compares their hash with the record's (`TuningRecord.kernel_hash`).

Target: the same kind and the same architecture, in canonical spelling; other attributes are free. A record of a lower
architecture of the same family answers too, where its decision is portable, and ranks last. Records never cross kinds
or vendors. Families, and which of their members is higher:

- `sm_XY` of one compute capability X (sm_80 < sm_86 < sm_89). A suffix (sm_90a) says "this one alone": no family.
- `znverN`, and `x86-64-vN`.

A decision is portable when it is a trace or the parameters of a template, and on a GPU only when its kernel is known to
take no more than 48 KiB of shared memory, which every member has. A library's algorithm belongs to its device.

Device: a decision measured on another device of the same architecture can be used, but its latency is not this
device's. Such records rank after all those of the same device, whatever their latency. The same device is the same
kind and product name, and on a CPU the same number of cores. Driver and CUDA versions are noted, and decide nothing.

Inside a rank the lower median latency wins; equal latencies are decided by the older record, so answers are stable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from relaxtune.tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord

#: Routes whose decision is bound to one workload hash and to the TVM that made it; the others are found by signature.
WORKLOAD_ROUTES = frozenset({Route.METASCHEDULE, Route.FALLBACK})
SIGNATURE_ROUTES = frozenset(Route) - WORKLOAD_ROUTES
#: Routes whose decision may be carried to a higher architecture.
PORTABLE_ROUTES = frozenset({Route.METASCHEDULE, Route.TEMPLATE})
#: Shared memory that a kernel may take on every GPU, without asking for more.
PORTABLE_SMEM_BYTES = 48 * 1024

# The family and the place in it. A tensor core generation is the first digit of sm_XY; sm_100 and later have two.
_FAMILIES = (
    ("cuda", re.compile(r"(sm_\d+)(\d)")),
    ("llvm", re.compile(r"(znver)(\d+)")),
    ("llvm", re.compile(r"(x86-64-v)(\d+)")),
)


@dataclass(frozen=True)
class Question:
    """The question of a look-up."""

    # The kernel to make. A look-up without one of them does not find the routes that go by it.
    workload_hash: str | None
    signature_key: str | None
    # Target of the code, and the device that runs it.
    target: TargetKey
    environment: Environment
    route: Route | None = None  # The only route wanted; None for all.

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes that can be found, in a fixed order."""
        wanted = tuple(Route) if self.route is None else (self.route,)
        known = {True: self.workload_hash is not None, False: self.signature_key is not None}
        return tuple(route for route in wanted if known[route in WORKLOAD_ROUTES])


class DeviceRank(IntEnum):
    """How well the device of a record fits the wanted one; lower is better."""

    SAME_DEVICE = 0
    SAME_ARCH = 1
    LOWER_ARCH = 2


def target_matches(wanted: TargetKey, found: TargetKey) -> bool:
    """Return whether a record made for `found` may be used for `wanted`."""
    return wanted.kind == found.kind and wanted.arch == found.arch


def target_is_lower(wanted: TargetKey, found: TargetKey) -> bool:
    """Return whether `found` is a lower architecture of the family of `wanted`."""
    if wanted.kind != found.kind:
        return False
    for kind, family in _FAMILIES:
        higher, lower = family.fullmatch(wanted.arch), family.fullmatch(found.arch)
        if kind == wanted.kind and higher and lower and higher[1] == lower[1]:
            return int(lower[2]) < int(higher[2])
    return False


def decision_is_portable(target: TargetKey, route: Route, smem_bytes: int | None) -> bool:
    """Return whether a record may be used on a higher architecture of its family."""
    fits = target.kind != "cuda" or (smem_bytes is not None and smem_bytes <= PORTABLE_SMEM_BYTES)
    return route in PORTABLE_ROUTES and fits


def rank_record(target: TargetKey, environment: Environment, record: TuningRecord) -> DeviceRank | None:
    """Return how well a record fits a place, None when it is not true there. SQL does the same in `ranking`."""
    if record.status is not Status.OK or why_not_true(target, environment, record) is not None:
        return None
    return (
        device_rank(environment, record.environment) if target_matches(target, record.target) else DeviceRank.LOWER_ARCH
    )


def why_not_true(target: TargetKey, environment: Environment, record: TuningRecord) -> str | None:
    """Return the rule by which a record, valid or failed, is not true at a place; None where it is."""
    if not versions_match(environment, record.environment, record.route):
        return (
            f"made by TVM {record.environment.tvm_version}, this is TVM {environment.tvm_version}: a decision of route "
            f"{record.route} belongs to the TVM that made it"
        )
    if target_matches(target, record.target):
        return None
    if not target_is_lower(target, record.target):
        return f"made for {record.target.kind} {record.target.arch}, wanted is {target.kind} {target.arch}"
    if not decision_is_portable(record.target, record.route, record.smem_bytes):
        why = "it takes more shared memory than every GPU has, or does not say how much"
        if record.route not in PORTABLE_ROUTES:
            why = f"route {record.route} is not portable"
        return f"made for the lower architecture {record.target.arch}, and {why}"
    return None


def versions_match(wanted: Environment, found: Environment, route: Route) -> bool:
    """Return whether the versions of TVM allow the use of a record of `route`."""
    return route not in WORKLOAD_ROUTES or wanted.tvm_version == found.tvm_version


def device_rank(wanted: Environment, found: Environment) -> DeviceRank:
    """Return how well the device of a record fits, given that its target matches."""
    return DeviceRank.SAME_DEVICE if device_of(wanted) == device_of(found) else DeviceRank.SAME_ARCH


def device_of(environment: Environment) -> tuple[object, ...]:
    """Return what tells devices apart whose latencies are not the same."""
    # On a GPU the cores are those of the host, which do not run the kernel.
    cores = environment.cores if environment.device_kind == "cpu" else None
    return environment.device_kind, environment.device_name, cores
