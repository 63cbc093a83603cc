"""Devices of a cluster that are held for a target, so that several actors may use each in turns.

A measuring actor takes most of a device, and actors that work on cells take small parts of the same one. Ray keeps what
is taken together, by a placement group for each device, and tells each actor which GPU it has.
"""

from __future__ import annotations

from types import ModuleType

from relaxtune.pipeline.tuning.ray.cluster import MeasuringPlace

#: Actors that work on cells, for each device.
SHARES = 8
_MEASURING = 0.6
_WORKING = (1.0 - _MEASURING) / SHARES


class Reservation:
    """The devices of a place, each by itself: one that others use is waited for without the rest.

    Parameters
    ----------
    ray : module
        Ray, connected to the cluster.
    place : MeasuringPlace
        GPUs.
    run : str
        Names the folder of the devices' turns, on each of their hosts.
    """

    def __init__(self, ray: ModuleType, place: MeasuringPlace, run: str) -> None:
        self.run, self.devices, self.cores = run, place.devices, place.cores
        self._ray = ray
        resources = place.actor.get("resources")
        bundle = {"GPU": 1.0, **(resources if isinstance(resources, dict) else {})}
        self._groups = [ray.util.placement_group([bundle]) for _ in range(place.devices)]

    def measuring(self, device: int) -> dict[str, object]:
        """Return what Ray is asked for the actor that measures on a device."""
        return self._part(device, _MEASURING)

    def working(self, device: int) -> dict[str, object]:
        """Return what Ray is asked for an actor that works on cells and times them on a device."""
        return self._part(device, _WORKING)

    def close(self) -> None:
        """Give the devices back; actors that still use them end."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)

    def _part(self, device: int, share: float) -> dict[str, object]:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._groups[device], 0)
        return {"num_cpus": 0, "num_gpus": share, "scheduling_strategy": strategy}
