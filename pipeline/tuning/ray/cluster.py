"""A Ray cluster as this project sees it: its nodes, what each has, and which of them measure for a target.

Ray places builders and actors, starts them again and finds out which nodes are lost. This file says what it needs for
that.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import ModuleType

from relaxtune.pipeline.environment import target_cores
from relaxtune.pipeline.errors import PipelineError, UsageError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tuning.ray.facts import NodeFacts, list_versions
from relaxtune.pipeline.tuning.ray.nodes import Node, NodeProcesses
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.capabilities import is_of
from relaxtune.tuning_db.records import Environment

logger = logging.getLogger(__name__)

#: Custom resource of a node whose CPU is measured on: `ray start --resources '{"relaxtune_cpu": 1}'`.
CPU_RESOURCE = "relaxtune_cpu"
#: Actors that work on cells, for each device; the parts of it that these and the measuring actor take.
SHARES = 8
_MEASURING = 0.6
_WORKING = (1.0 - _MEASURING) / SHARES
_MODEL_RESOURCE = "accelerator_type:"
_SAME_ENVIRONMENT = "start every node from the same environment"
_REMEDIES = {
    "python": _SAME_ENVIRONMENT,
    "ray": _SAME_ENVIRONMENT,
    "its code": "check the same commit out, or install the same wheel, on every node, and restart Ray there",
}


@dataclass(frozen=True)
class MeasuringPlace:
    """The nodes that measure for a target, all with one model of device."""

    environment: Environment  # Of all of them.
    devices: int  # How many devices they have.
    actor: dict[str, object]  # Ray options of a measuring actor: it gets a device of this model.
    undisturbed: bool  # Builders run elsewhere, or do not disturb the device's clock.
    cores: int  # CPUs of these nodes.
    cpus: float = 0.0  # CPUs that the actors take from the builders.


def new_run() -> str:
    """Return a name for a run that no other has."""
    return f"ray-{uuid.uuid4().hex[:12]}"


@contextmanager
def connected(address: str) -> Iterator[ModuleType]:
    """Connect this process to a cluster; a connection that is there already is used and left open.

    Raises `UsageError`: ray is not installed, or no cluster answers at the address.
    """
    try:
        import ray
    except ImportError as e:
        raise UsageError("--cluster needs Ray, which is not installed: pip install 'relaxtune[cluster]'") from e
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, namespace="relaxtune", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as e:
        raise UsageError(
            f"no Ray cluster can be used at {address}: {last_line(e).rstrip('.')}. Run `ray start --head --port 6379` "
            "on the head and `ray start --address HEAD:6379` on every other node; the driver runs on any of them and "
            "needs no GPU"
        ) from e
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class NodeReport:
    """One node: its devices, the cores it builds with, and its faults, each with its remedy."""

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

    Raises `UsageError`: ray is not installed here, or no cluster answers.
    """
    with connected(address) as ray, closing(NodeProcesses(ray, new_run())) as processes:
        return tuple(report_on(node) for node in processes.nodes())


def report_on(node: Node) -> NodeReport:
    """Return what is wrong with a node."""
    devices: list[str] = []
    faults = [*other_versions(node)]
    if node.facts is not None:
        devices += [gpu.model for gpu in node.facts.gpus]
        if node.resources.get(CPU_RESOURCE):
            devices.append(f"{node.facts.cpu_name} ({node.facts.cpu_arch})")
        offered, found = int(node.resources.get("GPU", 0)), len(node.facts.gpus)
        if offered > found:
            faults.append(f"Ray offers {offered} GPUs, TVM finds {found}: look at `relaxtune doctor` there")
        if found and not offered:
            faults.append(f"Ray offers none of its {found} GPUs: start it with `ray start --num-gpus {found}`")
    return NodeReport(node.host, node.id, int(node.resources.get("CPU", 0)), tuple(devices), tuple(faults))


def other_versions(node: Node) -> Iterator[str]:
    """Yield what a node has in another version than this process, each with its remedy."""
    if node.facts is None:
        yield f"{node.fault}: install relaxtune there, for the Python that runs Ray"
        return
    for name, here in list_versions().items():
        there = node.facts.versions.get(name, "none")
        remedy = _REMEDIES.get(name, f"pip install '{name}=={here}' there, and restart Ray")
        if there != here:
            yield f"{name} is {there}, here it is {here}: {remedy}"


def require_equal(nodes: Sequence[Node]) -> None:
    """Check that every node has what this process has: else code and records would differ.

    Raises `PipelineError`: one does not; the message names it.
    """
    for node in nodes:
        for fault in other_versions(node):
            raise PipelineError(f"node {node.host}: {fault}; `relaxtune cluster check` lists all differences")


def find_place(nodes: Sequence[Node], target: ResolvedTarget) -> MeasuringPlace | None:
    """Return what measures for a target; None where no node has a device for it.

    Of several models that fit, the one with the most devices is taken.
    """
    return _gpu_place(nodes, target) if target.kind == "cuda" else _cpu_place(nodes, target)


def _gpu_place(nodes: Sequence[Node], target: ResolvedTarget) -> MeasuringPlace | None:
    found: dict[Environment, list[tuple[Node, int]]] = {}
    for node in nodes:
        facts = node.facts
        offered = int(node.resources.get("GPU", 0))
        if facts is None or not offered:
            continue
        for model in sorted({gpu.model for gpu in facts.gpus if is_of(target.arch, gpu.compute)}):
            environment = _environment(facts, target, "cuda", model, None)
            count = sum(gpu.model == model for gpu in facts.gpus)
            found.setdefault(environment, []).append((node, min(offered, count)))
    if not found:
        return None
    environment = max(found, key=lambda one: sum(count for _, count in found[one]))
    if len(found) > 1:
        logger.info("measuring on %s", environment.device_name)
    chosen = found[environment]
    names = {name for node, _ in chosen for name in node.resources if name.startswith(_MODEL_RESOURCE)}
    actor: dict[str, object] = {"num_gpus": 1, "num_cpus": 0}
    # Ray tells models apart by this resource, which it finds out itself.
    if len(names) == 1:
        actor["resources"] = {names.pop(): 0.001}
    elif len(nodes) > len(chosen):
        logger.warning("Ray does not tell the GPU models of this cluster apart; actors that get another one end")
    devices = sum(count for _, count in chosen)
    return MeasuringPlace(environment, devices, actor, undisturbed=True, cores=_cores(node for node, _ in chosen))


def _cpu_place(nodes: Sequence[Node], target: ResolvedTarget) -> MeasuringPlace | None:
    fitting = [one for one in nodes if one.facts is not None and one.facts.cpu_arch == target.arch]
    marked = [one for one in fitting if one.resources.get(CPU_RESOURCE)]
    if not marked:
        if fitting:
            logger.warning(
                "no node with %s is marked to measure on: start one with ray start --resources '{\"%s\": 1}'",
                target.arch,
                CPU_RESOURCE,
            )
        return None
    first = marked[0]
    assert first.facts is not None
    environment = _environment(first.facts, target, "cpu", first.facts.cpu_name, target_cores(target))
    same = [one for one in marked if one.facts is not None and one.facts.cpu_name == first.facts.cpu_name]
    elsewhere = _cores(one for one in nodes if one not in same)
    # A measured node builds nothing, as long as another one can.
    cpus = min(one.resources.get("CPU", 0) for one in same) if elsewhere else 0
    actor: dict[str, object] = {"num_cpus": cpus, "resources": {CPU_RESOURCE: 1}}
    cores = _cores(same)
    taken = cores if elsewhere else 0
    return MeasuringPlace(environment, len(same), actor, undisturbed=bool(elsewhere), cores=cores, cpus=taken)


def _cores(nodes: Iterable[Node]) -> int:
    return int(sum(one.resources.get("CPU", 0) for one in nodes))


def _environment(facts: NodeFacts, target: ResolvedTarget, kind: str, name: str, cores: int | None) -> Environment:
    return Environment(
        device_kind=kind,
        device_name=name,
        arch=target.arch,
        driver=facts.driver if kind == "cuda" else None,
        cuda=facts.cuda if kind == "cuda" else None,
        tvm_version=facts.versions["apache-tvm"],
        tvm_ffi_version=facts.versions["apache-tvm-ffi"],
        cores=cores,
    )


class Reservation:
    """The devices of a place, held so that several actors may use each: Ray keeps a placement group for each device.

    A measuring actor takes most of a device, and actors that work on cells take small parts of it. One that others use
    is waited for without the rest.

    `run` names the folder of the devices' locks, on each of their hosts.
    """

    def __init__(self, ray: ModuleType, place: MeasuringPlace, run: str) -> None:
        self.run, self.devices, self.cores = run, place.devices, place.cores
        self._ray = ray
        resources = place.actor.get("resources")
        bundle = {"GPU": 1.0, **(resources if isinstance(resources, dict) else {})}
        self._groups = [ray.util.placement_group([bundle]) for _ in range(place.devices)]

    def measuring(self, device: int) -> dict[str, object]:
        """Return the Ray options of the actor that measures on a device."""
        return self._part(device, _MEASURING)

    def working(self, device: int) -> dict[str, object]:
        """Return the Ray options of an actor that works on cells and times them on a device."""
        return self._part(device, _WORKING)

    def close(self) -> None:
        """Give the devices back; actors that still use them end."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)

    def _part(self, device: int, share: float) -> dict[str, object]:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._groups[device], 0)
        return {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": strategy}
