"""GPUs by name: multiprocessors, clock, bandwidth, and how fast `mma.sync` multiplies, as NVIDIA states them.

One table, for first proposals: what a cost model predicts from it for a GPU that it was not fitted on is on paper.

Sources. NVIDIA's own: A100: data sheet (1758950-r4: 1,555, 1,935 and 2,039 GB/s) and "NVIDIA A100 Tensor Core GPU
Architecture" (multiprocessors, clock, 312 TFLOP/s of halves). RTX 4090: "NVIDIA Ada GPU Architecture" (multiprocessors,
clock, 1,008 GB/s, 165 TFLOP/s of halves with float32 sums). RTX 5090: "NVIDIA RTX Blackwell GPU Architecture" (the same
of it: 1,792 GB/s, 210 TFLOP/s). A10, L4, L40S, H100, H200: bandwidth and TFLOP/s from their data sheets (A10 600 GB/s,
125 and 31.2 TFLOP/s; L4 300 GB/s, 121 and 30.3; L40S 864 GB/s, 362 and 91.6; H100 SXM 3.35 TB/s; H200 4.8 TB/s). H100's
and H200's multiprocessors: "NVIDIA H100 Tensor Core GPU Architecture".

Not NVIDIA's: multiprocessors and clock of A10, L4 and L40S are of third-party pages, which disagree on the L4 (58 or
60); those taken here make the TFLOP/s of float32 that the data sheets state. The clock of H100 and H200 is what the
driver of an H200 tells as the highest.

Multiply-adds are TFLOP/s without sparsity over 2 * multiprocessors * clock. The data sheets of Hopper state wgmma's,
2,048. mma.sync is assumed to have half of it: a product of 4096 cubed reached 429 TFLOP/s on an H200
(`benchmarks/results/h200-mma-sync.json`), which is 821 in a cycle of the clock here.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaxtune.schedules.errors import TargetError


@dataclass(frozen=True)
class Gpu:
    """The resources of a GPU."""

    name: str  # As its driver calls it, without the maker and the form.
    compute: str  # Its compute capability.
    multiprocessors: int  # How many there are.
    clock_mhz: int  # Boost clock.
    bandwidth_gb_s: int  # Of its memory.
    multiply_adds: int  # Of halves with sums in float32, by `mma.sync`; a multiprocessor, a cycle.
    float_multiply_adds: int = 128  # Of float32; a multiprocessor, a cycle.


A100_40 = Gpu("A100 40GB", "8.0", 108, 1410, 1555, 1024, 64)
A100 = Gpu("A100 80GB", "8.0", 108, 1410, 2039, 1024, 64)
A10 = Gpu("A10", "8.6", 72, 1695, 600, 512)
L4 = Gpu("L4", "8.9", 58, 2040, 300, 512)
L40S = Gpu("L40S", "8.9", 142, 2520, 864, 512)
RTX_4090 = Gpu("RTX 4090", "8.9", 128, 2520, 1008, 256)
H100 = Gpu("H100 SXM", "9.0", 132, 1980, 3350, 1024)
H200 = Gpu("H200", "9.0", 132, 1980, 4800, 1024)
RTX_5090 = Gpu("RTX 5090", "12.0", 170, 2407, 1792, 256)
GPUS = (A100_40, A100, A10, L4, L40S, RTX_4090, H100, H200, RTX_5090)
# Names that drivers give them, where they differ.
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


def get_gpu(name: str) -> Gpu:
    """Return the GPU of a name, however it is spaced and whichever its case: `RTX 4090`, `rtx-4090`.

    Raises `TargetError`: the table has none of this name.
    """
    found = next((gpu for gpu in GPUS if _plain(gpu.name) == _plain(name)), None)
    if found is None:
        raise TargetError(f"GPU {name!r} is not in the table; expected one of {', '.join(gpu.name for gpu in GPUS)}.")
    return found


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")
