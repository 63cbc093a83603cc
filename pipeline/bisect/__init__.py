"""From a wrong result to what brought it in: the ONNX node, the pass, the kernel."""

from __future__ import annotations

from relaxtune.pipeline.bisect.result import Bisection, Culprit, FaultyKernel, FaultyPass, render
from relaxtune.pipeline.bisect.search import bisect, check_kernels

__all__ = ["Bisection", "Culprit", "FaultyKernel", "FaultyPass", "bisect", "check_kernels", "render"]
