"""The table of GPUs: what follows from its figures agrees with the throughputs that NVIDIA states."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import tvm

from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.schedules.errors import TargetError
from relaxtune.schedules.targets import PLANNED_FOR, resolve_target, target_limits
from relaxtune.schedules.targets.gpus import GPUS, find_gpu
from relaxtune.schedules.templates.base import cuda_limits

# TFLOP/s without sparsity: halves on tensor cores with float32 sums (None: Hopper states those of wgmma), float32.
STATED = {
    "A100 40GB": (312, 19.5),
    "A100 80GB": (312, 19.5),
    "A10": (125, 31.2),
    "L4": (121, 30.3),
    "L40S": (362.05, 91.6),
    "RTX 4090": (165.2, 82.6),
    "H100 SXM": (None, 67),
    "H200": (None, 67),
    "RTX 5090": (209.5, 104.8),
}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_multiply_adds_make_the_stated_throughput(gpu) -> None:
    halves, floats = STATED[gpu.name]
    cycles = 2 * gpu.multiprocessors * gpu.clock_mhz * 1e-6
    assert halves is None or cycles * gpu.multiply_adds == pytest.approx(halves, rel=0.02)
    assert cycles * gpu.float_multiply_adds == pytest.approx(floats, rel=0.01)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_gives(device: str, name: str) -> None:
    found = find_gpu(device)
    assert found is not None
    assert found.name == name
    assert find_gpu("NVIDIA RTX A6000") is None


@pytest.mark.parametrize(
    ("arch", "name"), [("sm_80", "A100 80GB"), ("sm_86", "A10"), ("sm_89", "L40S"), ("sm_120", "RTX 5090")]
)
def test_a_target_that_is_not_here_is_taken_for_a_usual_gpu(arch: str, name: str) -> None:
    limits = cuda_limits(resolve_target(f"cuda:{arch}"))
    assert limits.gpu is not None
    assert limits.gpu.name == name
    assert limits.likely_sm_count == limits.gpu.multiprocessors


@pytest.mark.parametrize("name", ["H200", "h200"])
def test_a_target_is_planned_for_the_gpu_that_it_names(name: str) -> None:
    plain, named = resolve_target("cuda:sm_80"), resolve_target(f"cuda:sm_80@{name}")
    limits = cuda_limits(named)
    assert limits.gpu is not None
    assert (limits.gpu.name, limits.likely_sm_count) == ("H200", 132)
    # Code is still of sm_80.
    assert limits.shared_bytes_optin == cuda_limits(plain).shared_bytes_optin
    assert named.target.attrs["arch"] == "sm_80"
    # Workers get the target as JSON; passes make limits of it alone.
    assert cuda_limits(resolve_target(str(named.target))) == limits == target_limits(named.target)
    # What is right and how fast follows from the code: records are of one target.
    assert target_key(named) == target_key(plain)
    assert resolve_target(f"cuda:sm_80@{name}", portable=True).limits == limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:sm_80@GTX 9", "'GTX 9' is not in the table; expected one of A100 40GB, A100 80GB, A10, L4"),
        ("cuda:sm_80@", "'' is not in the table"),
        ("cuda:sm_90a@A10", "code for sm_90a does not run on A10, whose compute capability is 8.6; .* cuda:sm_86"),
        (json.dumps({"kind": "cuda", "arch": "sm_89", PLANNED_FOR: "A100 80GB"}), "does not run on A100 80GB"),
    ],
)
def test_a_gpu_that_cannot_be_planned_for_is_refused(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        resolve_target(text)


@dataclass
class Device:
    """What is asked of a device of this machine."""

    compute_version: str
    device_name: str
    multi_processor_count: int
    api_version: int = 13000
    exist: bool = True


@pytest.mark.parametrize(
    ("text", "portable", "count", "name"),
    [
        ("cuda:sm_80", True, 132, "NVIDIA H200"),
        ("cuda:sm_80", False, 108, "unknown"),
        ("cuda:sm_90", False, 132, "NVIDIA H200"),
        ("cuda:sm_90a", False, 132, "NVIDIA H200"),
        ("cuda:sm_120", True, 170, "unknown"),
        ("cuda:sm_80@A100 40GB", True, 108, "NVIDIA H200"),
    ],
)
def test_kernels_are_planned_for_the_gpu_of_this_machine_where_it_runs_them(
    text: str, portable: bool, count: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Device("9.0", "NVIDIA H200", 132)
    monkeypatch.setattr(tvm, "cuda", lambda index=0: here)
    target = resolve_target(text, portable=portable)
    assert cuda_limits(target).likely_sm_count == count
    assert detect_environment(target).device_name == name


def test_code_of_a_lower_minor_version_is_planned_for_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm, "cuda", lambda index=0: Device("8.6", "NVIDIA A10", 72))
    limits = cuda_limits(resolve_target("cuda:sm_80"))
    assert limits.gpu is not None
    assert (limits.gpu.name, limits.sm_count) == ("A10", 72)
    # A block of its code asks for an A100's shared memory, which an A10 lacks.
    assert limits.shared_bytes_optin == 99 * 1024


def test_portable_code_asks_for_no_more_shared_memory_than_every_newer_gpu_has() -> None:
    assert cuda_limits(resolve_target("cuda:sm_80", portable=True)).shared_bytes_optin == 99 * 1024
    assert cuda_limits(resolve_target("cuda:sm_80")).shared_bytes_optin == 163 * 1024
    # Planned for one of them, it is that one's.
    assert cuda_limits(resolve_target("cuda:sm_80@H200", portable=True)).shared_bytes_optin == 163 * 1024
    assert cuda_limits(resolve_target("cuda:sm_80@RTX 4090", portable=True)).shared_bytes_optin == 99 * 1024
