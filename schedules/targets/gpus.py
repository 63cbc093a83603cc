"""GPUs by name: multiprocessors, clock, bandwidth, and how fast `mma.sync` multiplies, as NVIDIA states them.

One table, for first proposals: what a cost model predicts from it for a GPU that it was not fitted on is on paper.

Sources. A100: data sheet (1758950-r4: 1,555, 1,935 and 2,039 GB/s) and "NVIDIA A100 Tensor Core GPU Architecture"
(multiprocessors, clock, 312 TFLOP/s of halves). A10, L4, L40S, H100, H200: their data sheets (A10 600 GB/s, 125
TFLOP/s; L4 300 GB/s, 121 TFLOP/s; L40S 864 GB/s, 362 TFLOP/s; H100 SXM 3.35 TB/s; H200 4.8 TB/s). RTX 4090: "NVIDIA Ada
GPU Architecture" (1,008 GB/s, 165 TFLOP/s of halves with float32 sums). RTX 5090: "NVIDIA RTX Blackwell GPU
Architecture" (1,792 GB/s, 210 TFLOP/s of the same). Multiply-adds are TFLOP/s without sparsity over 2 * multiprocessors
* clock. The data sheets of Hopper state wgmma's, 2,048; mma.sync is taken for half of that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What a GPU has.

    Attributes
    ----------
    name
        As its driver calls it, without the maker and the form.
    multiprocessors
        How many there are.
    clock_mhz
        Boost clock.
    bandwidth_gb_s
        Of its memory.
    multiply_adds, float_multiply_adds
        Of halves with sums in float32, by `mma.sync`, and of float32, for each multiprocessor and cycle.
    """

    name: str
    multiprocessors: int
    clock_mhz: int
    bandwidth_gb_s: int
    multiply_adds: int
    float_multiply_adds: int = 128


A100_40, A100 = Gpu("A100 40GB", 108, 1410, 1555, 1024, 64), Gpu("A100 80GB", 108, 1410, 2039, 1024, 64)
A10 = Gpu("A10", 72, 1695, 600, 512)
L4 = Gpu("L4", 58, 2040, 300, 512)
L40S = Gpu("L40S", 142, 2520, 864, 512)
RTX_4090 = Gpu("RTX 4090", 128, 2520, 1008, 256)
H100 = Gpu("H100 SXM", 132, 1980, 3350, 1024)
H200 = Gpu("H200", 132, 1980, 4800, 1024)
RTX_5090 = Gpu("RTX 5090", 170, 2407, 1792, 256)
GPUS = (A100_40, A100, A10, L4, L40S, RTX_4090, H100, H200, RTX_5090)
# What drivers call them, where that is not the name.
_DEVICES = {
    "A100-SXM4-40GB": A100_40,
    "A100-PCIE-40GB": A100_40,
    "A100-SXM4-80GB": A100,
    "A100 80GB PCIe": A100,
    "H100 80GB HBM3": H100,
    **{gpu.name: gpu for gpu in (A10, L4, L40S, RTX_4090, H200, RTX_5090)},
}


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU that a driver calls so, such as `NVIDIA GeForce RTX 4090`; None where the table lacks it."""
    return _DEVICES.get(device_name.removeprefix("NVIDIA ").removeprefix("GeForce ").strip())
