"""Which nodes of a cluster measure for a target, told by what each node says of itself."""

from __future__ import annotations

from relaxtune.pipeline.tuning.ray.cluster import Node, find_place
from relaxtune.pipeline.tuning.ray.facts import Gpu, NodeFacts
from relaxtune.schedules.targets import resolve_target


def node(name: str, gpu: Gpu | None, cpus: int, gpus: int = 2) -> Node:
    facts = NodeFacts(
        versions={"apache-tvm": "0.27.0", "apache-tvm-ffi": "0.1.14"},
        cpu_name="any",
        cpu_arch="znver5",
        cores=cpus,
        gpus=() if gpu is None else (gpu,) * gpus,
        driver="580",
        cuda="13.0",
        compiler="any",
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
