"""The rules that say where a record is true. Nothing else in the package decides it.

A record answers a lookup when it is `ok`, its target matches, and the rule of its route holds:

=============  ==================================  ====================================================
route          found by                            also needs
=============  ==================================  ====================================================
metaschedule   workload hash                       the same TVM version: traces and hashes belong to one
fallback       workload hash                       the same TVM version: the code is TVM's own
template       signature                           nothing: parameters of a kernel of ours
library        signature                           nothing: parameters of a vendor primitive
=============  ==================================  ====================================================

Target: the same kind and the same architecture, in canonical spelling; other attributes are free. So a record never
crosses kinds, vendors or architectures.

Device: a decision measured on another device of the same architecture can be used, but its latency is not this
device's. Such records rank after all those of the same device, whatever their latency. The same device is the same
kind and product name, and on a CPU the same number of cores. Driver and CUDA versions are noted, and decide nothing.

Inside a rank the lower median latency wins; equal latencies are decided by the older record, so answers are stable.
"""

from __future__ import annotations

from enum import IntEnum

from tuning_db.records import Environment, Route, TargetKey

#: Routes whose decision is bound to one workload hash; the others are found by signature.
WORKLOAD_ROUTES = frozenset({Route.METASCHEDULE, Route.FALLBACK})
#: Routes whose decision is bound to the TVM that made it.
TVM_BOUND_ROUTES = frozenset({Route.METASCHEDULE, Route.FALLBACK})


class DeviceRank(IntEnum):
    """How well the device of a record fits the one asked for; lower is better."""

    SAME_DEVICE = 0
    SAME_ARCH = 1


def target_matches(wanted: TargetKey, found: TargetKey) -> bool:
    """Return whether a record made for `found` may be used for `wanted`."""
    return wanted.kind == found.kind and wanted.arch == found.arch


def tvm_version_matches(wanted: Environment, found: Environment, route: Route) -> bool:
    """Return whether the TVM version of a record allows its use by `route`."""
    return route not in TVM_BOUND_ROUTES or wanted.tvm_version == found.tvm_version


def device_rank(wanted: Environment, found: Environment) -> DeviceRank:
    """Return how well the device of a record fits, given that its target matches."""
    same_product = wanted.device_kind == found.device_kind and wanted.device_name == found.device_name
    # On a GPU the cores are those of the host, which do not run the kernel.
    same_cores = wanted.device_kind != "cpu" or wanted.cores == found.cores
    return DeviceRank.SAME_DEVICE if same_product and same_cores else DeviceRank.SAME_ARCH


def routes_to_search(route: Route | None, *, by_workload: bool, by_signature: bool) -> tuple[Route, ...]:
    """Return the routes that a lookup can answer, in a fixed order.

    Parameters
    ----------
    route : Route or None
        The only route wanted, or None for all.
    by_workload, by_signature : bool
        Which keys the lookup has.
    """
    wanted = tuple(Route) if route is None else (route,)
    return tuple(r for r in wanted if (by_workload if r in WORKLOAD_ROUTES else by_signature))
