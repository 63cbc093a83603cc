"""The devices of this machine that candidates are measured on, and what pins a process to one of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm

from relaxtune.pipeline.errors import UsageError
from relaxtune.schedules.targets import ResolvedTarget

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Device:
    """A device as its measuring process sees it: TVM's name there, and the environment variables that pin it."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)


def pinned(device: str) -> Device:
    """Return a device of this process for a process of its own, which sees no other GPU."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return Device(device)
    visible = [one.strip() for one in os.environ.get(_VISIBLE, "").split(",") if one.strip()]
    return Device("cuda:0", {_VISIBLE: visible[int(index)] if visible else index})


def choose_devices(target: ResolvedTarget, wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the devices to measure on: those wanted, by default all GPUs of the model that the target is for.

    A CPU is one device: two measurements side by side would disturb each other.

    Raises `UsageError`: a device is not there, of another kind or model, or named twice.
    """
    if target.kind != "cuda":
        if wanted and tuple(wanted) != ("cpu:0",):
            raise UsageError(
                f"Target {target.kind} is measured on cpu:0, got {', '.join(wanted)}; leave --devices out."
            )
        return ("cpu:0",)
    models = _gpu_models()
    first = next(iter(models.values()), None)
    if not wanted:
        chosen = tuple(name for name, model in models.items() if model == first) or ("cuda:0",)
        if len(models) > 1:
            logger.info("measuring on %s (%s)", ", ".join(chosen), first)
        return chosen
    if len(set(wanted)) < len(wanted) or not set(wanted) <= models.keys():
        here = ", ".join(models) or "none: no GPU is visible"
        raise UsageError(f"--devices names {', '.join(wanted)}; expected different ones of {here}.")
    others = [f"{name} is {models[name]}" for name in wanted if models[name] != first]
    if others:
        raise UsageError(
            f"All devices of a run are of one model, here {first} (cuda:0): {', '.join(others)}. "
            f"Leave it out, or let {_VISIBLE} name the GPUs of the other model only."
        )
    return tuple(wanted)


def _gpu_models() -> dict[str, str]:
    models: dict[str, str] = {}
    while (device := tvm.cuda(len(models))).exist:
        models[f"cuda:{len(models)}"] = str(device.device_name)
    return models
