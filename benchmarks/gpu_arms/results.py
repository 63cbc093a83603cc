"""The results file: the machine, and one entry a case, written anew after each case; and the table made of it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.gpu_arms.order import ARMS, OWN_ARM
from relaxtune.pipeline.environment import cpu_name

_PACKAGES = ("relaxtune", "apache-tvm", "apache-tvm-ffi", "torch", "triton", "onnxruntime-gpu", "nvidia-cudnn-cu13")
_GPU_FIELDS = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")

Entry = Mapping[str, Any]


def machine() -> dict[str, object]:
    """Return the GPU, its driver, the CPU and the versions that the figures are true for; None without a GPU."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    gpu = None
    if shutil.which(query[0]):
        line = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        gpu = dict(zip(_GPU_FIELDS, (part.strip() for part in line.split(",")), strict=True))
    return {
        "gpu": gpu,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": _torch_cuda(),
    }


def read_entries(path: Path) -> list[Entry]:
    """Return the cases of an earlier results file, none when there is no file."""
    if not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["cases"])


def write_results(path: Path, conditions: Mapping[str, object], entries: Sequence[Entry]) -> None:
    """Write the file whole, with the geometric means over the cases so far."""
    document = {
        **conditions,
        "quoted": "latencies_ms: host clock around one launch and a synchronise, inputs on the device",
        "geometric_mean_of_ratios": overall(entries),
        "cases": list(entries),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.staged")
    staged.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    staged.replace(path)


def best_peer(entry: Entry, key: str = "median_ms") -> tuple[str, float] | None:
    """Return the fastest arm that is not relaxtune's, and its figure; None when none was timed."""
    peers = [(name, arm[key]) for name, arm in entry.get("arms", {}).items() if name != OWN_ARM]
    return min(peers, key=lambda peer: peer[1]) if peers else None


def ratio(entry: Entry, key: str = "median_ms") -> float | None:
    """Return the best peer's figure over relaxtune's: above 1, relaxtune is faster. None when one is missing."""
    own, peer = entry.get("arms", {}).get(OWN_ARM), best_peer(entry, key)
    return peer[1] / own[key] if own and peer else None


def overall(entries: Sequence[Entry]) -> dict[str, float | int | None]:
    """Return the geometric means of the ratios, by the host clock and by events, and over how many cases."""
    means: dict[str, float | int | None] = {}
    for name, key in (("host_clock", "median_ms"), ("device", "device_median_ms")):
        values = [value for entry in entries if (value := ratio(entry, key)) is not None]
        means[name] = statistics.geometric_mean(values) if values else None
    means["cases"] = sum(ratio(entry) is not None for entry in entries)
    return means


def table(entries: Sequence[Entry]) -> Table:
    """Return the cases as a table: medians with 95th percentiles, ratios, and the geometric mean."""
    means = overall(entries)
    shown = Table(
        title="latency, ms: median (p95), host clock around launch and synchronise",
        caption="ratio: best peer / relaxtune; on the device: the same by CUDA events",
    )
    shown.add_column("case")
    for column in (*ARMS, "ratio", "on the device"):
        shown.add_column(column, justify="right")
    for entry in entries:
        cells = [_cell(entry, name) for name in ARMS]
        shown.add_row(entry["case"], *cells, _number(ratio(entry)), _number(ratio(entry, "device_median_ms")))
    shown.add_section()
    blank = [""] * len(ARMS)
    shown.add_row(f"geometric mean of {means['cases']}", *blank, _number(means["host_clock"]), _number(means["device"]))
    return shown


def notes(entries: Sequence[Entry]) -> list[str]:
    """Return what a reader must know besides the numbers: which arms are missing, and why."""
    lines = []
    for entry in entries:
        if "failed" in entry:
            lines.append(f"{entry['case']}: {entry['failed']}")
        lines.extend(f"{entry['case']}: no {name}: {reason}" for name, reason in entry.get("skipped", {}).items())
    return lines


def _cell(entry: Entry, name: str) -> str:
    arm = entry.get("arms", {}).get(name)
    return f"{arm['median_ms']:.3f} ({arm['p95_ms']:.3f})" if arm else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return str(torch.version.cuda) if torch.version.cuda else None
