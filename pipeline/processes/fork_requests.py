"""What a fork server is asked; its answers are in `pipeline.processes.fork_server`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fork:
    """Fork a worker of a module, with these environment variables and no others."""

    module: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class HasGpuOpen:
    """Tell whether the server itself uses a GPU: then no worker that it forks can."""


@dataclass(frozen=True)
class Reap:
    """Tell how a worker ended, waiting so long for its end."""

    pid: int
    timeout_s: float
