"""Pass: group operations into kernels."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.onnx_nodes_of_kernels import name_fused, record_unfused


def fuse_operations(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with groups of operations outlined into functions (`FuseOps`), ONNX nodes carried over.

    A matmul, norm or softmax takes the elementwise operations after it into its group (bias, activation, residual,
    scale, mask); elementwise chains, reshapes and transposes group among themselves.
    """
    unfused = record_unfused(mod)
    return name_fused(relax.transform.FuseOps()(mod), unfused, state)
