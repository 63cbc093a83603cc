"""What is missing on the nodes of a cluster, or is there in another version, and how to mend it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from relaxtune.pipeline.tuning.ray.cluster import CPU_RESOURCE, connected, other_versions
from relaxtune.pipeline.tuning.ray.nodes import Node, NodesAsked


@dataclass(frozen=True)
class NodeReport:
    """One node: what it measures on, the cores it builds with, and what is wrong, each with its remedy."""

    host: str
    node: str
    cpus: int
    devices: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


def check_cluster(address: str) -> tuple[NodeReport, ...]:
    """Return what each living node has and lacks, against this process.

    Raises
    ------
    UsageError
        Ray is not installed here, or no cluster answers.
    """
    with connected(address) as ray, closing(NodesAsked(ray)) as asked:
        return tuple(report_on(node) for node in asked.nodes())


def report_on(node: Node) -> NodeReport:
    """Return what is wrong with a node."""
    devices: list[str] = []
    faults: list[str] = []
    offered = int(node.resources.get("GPU", 0))
    if node.facts is None:
        faults.append(f"{node.fault}: install relaxtune there, for the Python that runs Ray")
    else:
        devices += [gpu.model for gpu in node.facts.gpus]
        if node.resources.get(CPU_RESOURCE):
            devices.append(f"{node.facts.cpu_name} ({node.facts.cpu_arch})")
        for name, (there, here) in other_versions(node).items():
            faults.append(f"{name} is {there}, here it is {here}: {_remedy(name, here)}")
        if offered > len(node.facts.gpus):
            faults.append(
                f"Ray offers {offered} GPUs, TVM finds {len(node.facts.gpus)}: look at `relaxtune doctor` there"
            )
        if node.facts.gpus and not offered:
            faults.append(
                f"Ray offers none of its {len(node.facts.gpus)} GPUs: start it with "
                f"`ray start --num-gpus {len(node.facts.gpus)}`"
            )
    return NodeReport(node.host, node.id, int(node.resources.get("CPU", 0)), tuple(devices), tuple(faults))


def _remedy(name: str, here: str) -> str:
    if name in ("python", "ray"):
        return "start every node from the same environment"
    if name == "its code":
        return "check the same commit out, or install the same wheel, on every node, and restart Ray there"
    return f"pip install '{name}=={here}' there, and restart Ray"
