"""Facts of a node: versions, processor, GPUs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SUFFIXES = frozenset({".py", ".c", ".h"})


@dataclass(frozen=True)
class Gpu:
    """One GPU: its product name, and its compute capability such as 9.0."""

    model: str
    compute: str


@dataclass(frozen=True)
class NodeFacts:
    """Facts of a node."""

    versions: Mapping[str, str]  # Of all that must be the same on every node: what makes code, and what sends it.
    # The processor, as LLVM calls it too.
    cpu_name: str
    cpu_arch: str
    gpus: tuple[Gpu, ...]
    # Of the GPUs; None without any.
    driver: str | None
    cuda: str | None

    @classmethod
    def from_json(cls, text: str) -> NodeFacts:
        """Return what a node's server printed (`pipeline.tuning.ray.node_server`)."""
        data = json.loads(text)
        return cls(**{**data, "gpus": tuple(Gpu(**one) for one in data["gpus"])})


@cache
def list_versions() -> dict[str, str]:
    """Return the versions of this process that must be the same on every node of a cluster."""
    import tvm
    import tvm_ffi

    import relaxtune

    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "relaxtune": relaxtune.__version__,
        "its code": hash_of_code(Path(relaxtune.__file__).parent)[:16],
        "apache-tvm": tvm.__version__,
        "apache-tvm-ffi": tvm_ffi.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "ray": importlib.metadata.version("ray"),
    }


def hash_of_code(package: Path, folders: Collection[str] = (), but: tuple[str, ...] = ()) -> str:
    """Return the sha256 of a package's code, names and contents: two checkouts of one version may differ.

    Without `folders` all folders count. Folders in `but` do not count.
    """
    digest = hashlib.sha256()
    for folder in sorted(one for one in package.iterdir() if one.is_dir() and (not folders or one.name in folders)):
        # A checkout has symbolic links here, which `rglob` follows when it begins with one.
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(package).as_posix()
            if path.suffix in _SUFFIXES and not name.startswith(but):
                digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read_facts() -> NodeFacts:
    """Return what this machine has."""
    import tvm
    from tvm.target import codegen

    from relaxtune.pipeline.environment import cpu_name, cuda_version, nvidia_driver_version

    gpus: list[Gpu] = []
    while (device := tvm.cuda(len(gpus))).exist:
        gpus.append(Gpu(str(device.device_name), str(device.compute_version)))
    return NodeFacts(
        versions=list_versions(),
        cpu_name=cpu_name(),
        cpu_arch=str(codegen.llvm_get_system_cpu()),
        gpus=tuple(gpus),
        driver=nvidia_driver_version() if gpus else None,
        cuda=cuda_version(int(tvm.cuda(0).api_version)) if gpus else None,
    )
