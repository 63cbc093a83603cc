"""Which nodes of a cluster measure for a target, told by what each node says of itself."""

from __future__ import annotations

from dataclasses import replace

from relaxtune.pipeline.batch.executors import ClusterExecutors
from relaxtune.pipeline.tuning.ray.cluster import CPU_RESOURCE, Node, find_place
from relaxtune.pipeline.tuning.ray.facts import Gpu, NodeFacts
from relaxtune.schedules.targets import resolve_target


def node(name: str, gpu: Gpu | None, cpus: int, gpus: int = 2) -> Node:
    facts = NodeFacts(
        versions={"apache-tvm": "0.27.0", "apache-tvm-ffi": "0.1.14"},
        cpu_name="any",
        cpu_arch="znver5",
        gpus=() if gpu is None else (gpu,) * gpus,
        driver="580",
        cuda="13.0",
    )
    resources = {"CPU": float(cpus)}
    if gpu is not None:
        resources |= {"GPU": float(gpus), f"accelerator_type:{gpu.model}": 1.0}
    return Node(name, name, resources, facts)


def test_a_place_has_the_cores_of_its_own_nodes_only() -> None:
    h200, l4 = Gpu("H200", "9.0"), Gpu("L4", "8.9")
    nodes = [node("head", None, 64), node("a", h200, 8), node("b", h200, 16), node("c", l4, 48)]
    place = find_place(nodes, resolve_target("cuda:sm_90a"))
    assert place is not None
    assert (place.environment.device_name, place.devices, place.cores) == ("H200", 4, 24)
    other = find_place(nodes, resolve_target("cuda:sm_89"))
    assert other is not None
    assert (other.environment.device_name, other.devices, other.cores) == ("L4", 2, 48)


def test_targets_of_different_devices_are_tuned_at_the_same_time() -> None:
    h200, l4 = Gpu("H200", "9.0"), Gpu("L4", "8.9")
    targets = [resolve_target(f"cuda:{arch}") for arch in ("sm_90a", "sm_89", "sm_90", "sm_80")]
    nodes = [node("head", None, 64), node("a", h200, 8), node("b", l4, 16)]
    executors = ClusterExecutors.__new__(ClusterExecutors)
    executors.nodes = nodes
    # What is measured on one model of GPU waits for it; for the last there is none.
    assert executors.apart(targets) == [[0, 2], [1], [3]]
    measured = replace(nodes[0], resources={"CPU": 4.0, CPU_RESOURCE: 1.0})
    executors.nodes = [measured]
    # Its own cores build for all: a measurement would hear them.
    cpus = [resolve_target('{"kind": "llvm", "mcpu": "znver5"}'), targets[3]]
    assert executors.apart(cpus) == [[0, 1]]
