"""The function of a module without padding that lists the tokens of a mask, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax, tirx

from relaxtune.models.unpadding import ENTRY, ROWS, SLOTS, SPANS, Unpadding
from relaxtune.pipeline.codegen.cuda_graph import NUM_INPUT
from relaxtune.pipeline.passes.kit.ir import dtype_of, main_of, shape_of
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.schedules.cpu.token_list import token_list_loops
from relaxtune.schedules.sizes import Size
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.token_list import token_list_kernel


def with_token_list(mod: tvm.ir.IRModule, lowered: LoweredModule) -> tvm.ir.IRModule:
    """Return the module with a function that lists the tokens of a mask, where `main` leaves padding out.

    ::

        list_tokens(mask, rows [rows * places], spans [rows * places, 2], slots [rows, places], count [1])

    It writes all but the mask. The first `count` of `rows` and `spans`, rounded up, and `slots` are the last inputs of
    `main` (`Unpadding`).
    """
    unpadding = lowered.unpadding
    if unpadding is None:
        return mod
    (given,) = (param for param in main_of(lowered.mod).params if param.name == unpadding.mask)
    builder = relax.BlockBuilder(mod)
    sizes: dict[str, tirx.Var] = {}
    shape = [
        sizes.setdefault(size.name, tirx.Var(size.name, "int64")) if isinstance(size, tirx.Var) else size
        for size in shape_of(given) or ()
    ]
    on_gpu = lowered.target.kind.name == "cuda"
    func = token_list(shape, dtype_of(given), unpadding.kept, on_gpu=on_gpu)
    function = builder.add_func(func, f"{ENTRY}_kernel")
    places = shape[0] * shape[1]
    types = [relax.TensorType(one, "int32") for one in ([places], [places, 2], shape, [1])]
    mask = relax.Var(unpadding.mask, relax.TensorType(shape, dtype_of(given)))
    written = [relax.Var(name, kind) for name, kind in zip((ROWS, SPANS, SLOTS, "count"), types, strict=True)]
    params = [mask, *written]
    with builder.function(ENTRY, params, attrs={NUM_INPUT: len(params)}):
        with builder.dataflow():
            lists = builder.emit_output(relax.op.call_tir_inplace(function, relax.Tuple(params), [1, 2, 3, 4], types))
        builder.emit_func_output(lists)
    return builder.get()


def listed_tokens(unpadding: Unpadding, mask: np.ndarray) -> list[np.ndarray]:
    """Return the last inputs of `main` for a mask, computed on the host."""
    func = token_list(mask.shape, str(mask.dtype), unpadding.kept, on_gpu=False)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    library = tvm.tirx.build(mod, target=resolve_target("llvm").target, pipeline=register_mixed_pipeline())
    rows, spans, slots, count = lists = [
        tvm.runtime.empty(shape, "int32") for shape in ((mask.size,), (mask.size, 2), mask.shape, (1,))
    ]
    library["main"](tvm.runtime.tensor(np.ascontiguousarray(mask)), *lists)
    size = unpadding.size(int(count.numpy()[0]), mask.size)
    return [rows.numpy()[:size], spans.numpy()[:size], slots.numpy()]


def token_list(shape: Sequence[Size], dtype: str, kept: Sequence[int], *, on_gpu: bool) -> tirx.PrimFunc:
    """Return the code that lists the tokens of a mask, the inner part of `list_tokens` above."""
    places = shape[0] * shape[1]
    shapes = {"mask": shape, ROWS: [places], SPANS: [places, 2], SLOTS: shape, "count": [1]}
    params = [tirx.decl_buffer(one, dtype if name == "mask" else "int32", name) for name, one in shapes.items()]
    func = tirx.PrimFunc(params, tirx.Evaluate(tirx.IntImm("int32", 0))).with_attr("tirx.noalias", True)
    return token_list_kernel(func, kept) if on_gpu else token_list_loops(func, kept)
