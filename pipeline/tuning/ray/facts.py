"""Facts of a node: versions, processor, GPUs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


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
        "its code": hash_of_code(Path(relaxtune.__file__).parent),
        "apache-tvm": tvm.__version__,
        "apache-tvm-ffi": tvm_ffi.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "ray": importlib.metadata.version("ray"),
    }


def hash_of_code(package: Path) -> str:
    """Return a hash of a package's Python files: two checkouts of one version may differ."""
    # The package's folders are symbolic links in a checkout, which `rglob` does not follow.
    folders = [one for one in package.iterdir() if one.is_dir()]
    files = {path.name: path for path in package.glob("*.py")}
    for folder in folders:
        files |= {
            f"{folder.name}/{path.relative_to(folder.resolve())}": path for path in folder.resolve().rglob("*.py")
        }
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\n".encode() + files[name].read_bytes())
    return digest.hexdigest()[:16]


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
