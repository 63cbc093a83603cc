"""A real Ray cluster of several nodes on this machine, small and without its dashboard."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from ray._private.node import Node
from ray.cluster_utils import Cluster

from relaxtune.pipeline.tuning.ray.cluster import CPU_RESOURCE

_STORE = {"object_store_memory": 80 * 2**20}


@contextmanager
def small_cluster(*, builders: int = 1, system: dict[str, object] | None = None) -> Iterator[Cluster]:
    """Give a head without a CPU, a node that measures, and nodes of one core that build; `system` configures Ray."""
    head = {"num_cpus": 0, "include_dashboard": False, **_STORE, **({"_system_config": system} if system else {})}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        add_measuring_node(cluster)
        for _ in range(builders):
            cluster.add_node(num_cpus=1, **_STORE)
        yield cluster
    finally:
        cluster.shutdown()


def add_measuring_node(cluster: Cluster) -> object:
    """Add a node whose CPU is measured on, one that builds nothing."""
    return cluster.add_node(num_cpus=1, resources={CPU_RESOURCE: 1}, **_STORE)


def measures(node: Node) -> bool:
    """Return whether a node was added to measure."""
    return CPU_RESOURCE in (node._ray_params.resources or {})


def kill_workers(cluster: Cluster, name: str) -> None:
    """Kill the Ray workers of a cluster that do something of this name now, or did last."""
    found = find_workers(cluster, name)
    assert found, f"no Ray worker does {name}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def find_workers(cluster: Cluster, name: str) -> list[int]:
    """Return the process ids of these workers."""
    raylets = [one.process.pid for node in cluster.list_all_nodes() for one in node.all_processes.get("raylet", ())]
    found = []
    for one in (child for pid in raylets for child in psutil.Process(pid).children(recursive=True)):
        if one.status() != psutil.STATUS_ZOMBIE and " ".join(one.cmdline()).startswith(f"ray::{name}"):
            found.append(one.pid)
    return found
