"""The table of GPUs: what follows from its figures agrees with the throughputs that NVIDIA states."""

from __future__ import annotations

import pytest

from relaxtune.schedules.targets import resolve_target
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
