"""What the figures of a run are true for: the machine, its load, the commit and the versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence

import numpy as np
import tvm

from relaxtune.pipeline.environment import cpu_name, nvidia_driver_version


def commit_here() -> str | None:
    """Return the commit of the checkout, None where there is no git."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or None


def run_facts(target: str = "llvm", loads: Sequence[float] = ()) -> dict[str, object]:
    """Return them as plain JSON data; `loads` are load averages that were seen meanwhile, by default now's."""
    gpu = tvm.cuda(0) if "cuda" in target else None
    seen = list(loads) or [os.getloadavg()[0]]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit_here(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": {"median": float(np.median(seen)), "max": max(seen)},
        "gpu": None if gpu is None else str(gpu.device_name),
        "driver": None if gpu is None else nvidia_driver_version(),
        "python": platform.python_version(),
        "tvm": tvm.__version__,
    }
