"""The passes: everything that happens to a graph between the import and the code generator, in one list.

`lower` runs phases 0 to 6; task extraction and tuning see the module as it is then (one PrimFunc per kernel, none
of them scheduled). Compilation schedules the PrimFuncs and runs phase 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import tvm
from tvm import relax
from tvm.relax import backend, transform as relax_pass

from relaxtune.pipeline.passes.annotate_patterns import annotate_patterns
from relaxtune.pipeline.passes.attention.append_caches import append_caches
from relaxtune.pipeline.passes.attention.append_in_attention import append_in_attention
from relaxtune.pipeline.passes.attention.keep_scores_in_cache import keep_scores_in_cache
from relaxtune.pipeline.passes.attention.recognise_attention import recognise_attention
from relaxtune.pipeline.passes.attention.recognise_rotary import recognise_rotary
from relaxtune.pipeline.passes.attention.remove_nan_guards import remove_nan_guards
from relaxtune.pipeline.passes.attention.rotate_in_matmul import rotate_in_matmul
from relaxtune.pipeline.passes.fill_empty import fill_empty
from relaxtune.pipeline.passes.fuse_operations import fuse_operations
from relaxtune.pipeline.passes.generation.multiply_by_caches import multiply_by_caches
from relaxtune.pipeline.passes.generation.write_together import write_together
from relaxtune.pipeline.passes.keep_chains_short import keep_chains_short
from relaxtune.pipeline.passes.keep_lookups_inside import keep_lookups_inside
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.layout.channels_last import channels_last
from relaxtune.pipeline.passes.layout.combine_matmuls import combine_matmuls
from relaxtune.pipeline.passes.layout.convolutions_to_matmul import convolutions_to_matmul
from relaxtune.pipeline.passes.layout.gather_before_slices import gather_before_slices
from relaxtune.pipeline.passes.layout.gather_rows import gather_rows
from relaxtune.pipeline.passes.layout.gathers_to_views import gathers_to_views
from relaxtune.pipeline.passes.layout.interleave_gates import interleave_gates
from relaxtune.pipeline.passes.layout.scatters_to_concat import scatters_to_concat
from relaxtune.pipeline.passes.layout.share_repeated_weights import share_repeated_weights
from relaxtune.pipeline.passes.layout.simplify_views import simplify_views
from relaxtune.pipeline.passes.layout.unflatten_matmuls import unflatten_matmuls
from relaxtune.pipeline.passes.layout.write_matmuls_transposed import write_matmuls_transposed
from relaxtune.pipeline.passes.legalise_operators import legalise_operators
from relaxtune.pipeline.passes.merge_common_subexpressions import merge_common_subexpressions
from relaxtune.pipeline.passes.name_bindings import name_bindings
from relaxtune.pipeline.passes.norms.centre_from_pivot import centre_from_pivot
from relaxtune.pipeline.passes.norms.fold_batch_norms import fold_batch_norms
from relaxtune.pipeline.passes.norms.fuse_norms import fuse_norms
from relaxtune.pipeline.passes.norms.norms_of_half import norms_of_half
from relaxtune.pipeline.passes.norms.quantise_in_norms import quantise_in_norms
from relaxtune.pipeline.passes.norms.recognise_norms import recognise_norms
from relaxtune.pipeline.passes.norms.widen_norms import widen_norms
from relaxtune.pipeline.passes.precision.accumulate_in_float32 import accumulate_in_float32
from relaxtune.pipeline.passes.precision.compute_in_half_precision import compute_in_half_precision
from relaxtune.pipeline.passes.precision.integer_matmuls import integer_matmuls
from relaxtune.pipeline.passes.precision.round_to_tf32 import mark_tf32, round_to_tf32
from relaxtune.pipeline.passes.recognise_activations import recognise_activations
from relaxtune.pipeline.passes.sum_in_blocks import sum_in_blocks
from relaxtune.pipeline.passes.symbolic.fold_known_values import fold_known_values
from relaxtune.pipeline.passes.symbolic.keep_sizes_apart import keep_sizes_apart
from relaxtune.pipeline.passes.symbolic.repeat_positions import repeat_positions
from relaxtune.pipeline.passes.symbolic.tabulate_positions import tabulate_positions
from relaxtune.pipeline.passes.tokens.unpad import unpad
from relaxtune.pipeline.passes.weights.fold_constants import fold_constants
from relaxtune.pipeline.passes.weights.lift_weights import lift_weights
from relaxtune.pipeline.passes.weights.mark_constants import mark_constants
from relaxtune.pipeline.passes.weights.pack_weights import pack_weights
from relaxtune.pipeline.passes.weights.quantise_weights import quantise_weights
from relaxtune.pipeline.passes.weights.turn_weights import turn_weights
from relaxtune.schedules.tir.expressions import find_all


class Phase(StrEnum):
    """The numbered phases of the lowering, in order."""

    CANONICALISE = "0 canonicalise"
    FOLD_CONSTANTS = "1 fold constants"
    REMOVE_DEAD_CODE = "2 remove dead code"
    PRECISION = "3 precision"
    PATTERNS = "4 pattern rewrites"
    LEGALISE = "5 legalise"
    FUSE = "6 fuse"
    PLAN_MEMORY = "7 plan memory"


@dataclass(frozen=True)
class Step:
    """One pass."""

    phase: Phase
    name: str  # The name in `disabled_passes`.
    run: Callable[[tvm.ir.IRModule, LoweringState], tvm.ir.IRModule]
    required: str = ""  # Why no module can do without it; "" where one can.
    makes_precision: bool = False  # Whether the requested precision depends on it: its failure ends the lowering.


def stock(tvm_pass: tvm.ir.transform.Pass) -> Callable[[tvm.ir.IRModule, LoweringState], tvm.ir.IRModule]:
    """Return a pass of TVM's own as what a `Step` runs."""

    def run(mod: tvm.ir.IRModule, _state: LoweringState) -> tvm.ir.IRModule:
        result: tvm.ir.IRModule = tvm_pass(mod)
        return result

    return run


_CODE_GENERATOR = "the code generator accepts nothing else"


def lowering_steps() -> tuple[Step, ...]:
    """Return the passes of phases 0 to 6, in order."""
    return (
        # 0 canonicalise
        Step(Phase.CANONICALISE, "name_bindings", name_bindings, "every report finds its ONNX nodes by these names"),
        Step(Phase.CANONICALISE, "canonicalise_bindings", stock(relax_pass.CanonicalizeBindings())),
        Step(Phase.CANONICALISE, "fill_empty", fill_empty),
        Step(Phase.CANONICALISE, "recognise_norms", recognise_norms),
        Step(Phase.CANONICALISE, "widen_norms", widen_norms),
        Step(Phase.CANONICALISE, "recognise_activations", recognise_activations),
        # Folded, the integers of a quantised weight would be numbers.
        Step(Phase.CANONICALISE, "integer_matmuls", integer_matmuls, makes_precision=True),
        # 1 fold constants
        Step(Phase.FOLD_CONSTANTS, "fold_constants", fold_constants),
        Step(Phase.FOLD_CONSTANTS, "fold_batch_norms", fold_batch_norms),
        Step(Phase.FOLD_CONSTANTS, "fold_known_values", fold_known_values),
        # 2 remove dead code
        Step(Phase.REMOVE_DEAD_CODE, "remove_dead_code", stock(relax_pass.DeadCodeElimination())),
        Step(Phase.REMOVE_DEAD_CODE, "merge_common_subexpressions", merge_common_subexpressions),
        Step(Phase.REMOVE_DEAD_CODE, "gathers_to_views", gathers_to_views),
        Step(Phase.REMOVE_DEAD_CODE, "unflatten_matmuls", unflatten_matmuls),
        Step(Phase.REMOVE_DEAD_CODE, "convolutions_to_matmul", convolutions_to_matmul),
        Step(Phase.REMOVE_DEAD_CODE, "share_repeated_weights", share_repeated_weights),
        Step(Phase.REMOVE_DEAD_CODE, "simplify_views", simplify_views),
        Step(Phase.REMOVE_DEAD_CODE, "scatters_to_concat", scatters_to_concat),
        Step(Phase.REMOVE_DEAD_CODE, "remove_nan_guards", remove_nan_guards),
        Step(Phase.REMOVE_DEAD_CODE, "unpad", unpad),
        # 3 precision
        Step(Phase.PRECISION, "compute_in_half_precision", compute_in_half_precision, makes_precision=True),
        Step(Phase.PRECISION, "round_to_tf32", round_to_tf32, makes_precision=True),
        Step(Phase.PRECISION, "accumulate_in_float32", accumulate_in_float32),
        # 4 pattern rewrites
        Step(Phase.PATTERNS, "tabulate_positions", tabulate_positions),
        Step(Phase.PATTERNS, "combine_matmuls", combine_matmuls),
        Step(Phase.PATTERNS, "gather_before_slices", gather_before_slices),
        Step(Phase.PATTERNS, "interleave_gates", interleave_gates),
        Step(Phase.PATTERNS, "recognise_rotary", recognise_rotary),
        Step(Phase.PATTERNS, "rotate_in_matmul", rotate_in_matmul),
        Step(Phase.PATTERNS, "recognise_attention", recognise_attention),
        Step(Phase.PATTERNS, "append_in_attention", append_in_attention),
        Step(Phase.PATTERNS, "append_caches", append_caches),
        Step(Phase.PATTERNS, "write_together", write_together),
        Step(Phase.PATTERNS, "multiply_by_caches", multiply_by_caches),
        Step(Phase.PATTERNS, "write_matmuls_transposed", write_matmuls_transposed),
        Step(Phase.PATTERNS, "norms_of_half", norms_of_half),
        Step(Phase.PATTERNS, "centre_from_pivot", centre_from_pivot),
        Step(Phase.PATTERNS, "gather_rows", gather_rows),
        Step(Phase.PATTERNS, "quantise_weights", quantise_weights, makes_precision=True),
        Step(Phase.PATTERNS, "channels_last", channels_last),
        Step(Phase.PATTERNS, "pack_weights", pack_weights),
        Step(Phase.PATTERNS, "turn_weights", turn_weights),
        # 5 legalise
        Step(Phase.LEGALISE, "dispatch_sampling", stock(backend.DispatchSampling()), _CODE_GENERATOR),
        Step(Phase.LEGALISE, "dispatch_sort_scan", stock(backend.DispatchSortScan()), _CODE_GENERATOR),
        Step(Phase.LEGALISE, "legalise_operators", legalise_operators, _CODE_GENERATOR),
        Step(Phase.LEGALISE, "keep_lookups_inside", keep_lookups_inside, "an index may not read foreign memory"),
        # 6 fuse
        Step(Phase.FUSE, "annotate_patterns", annotate_patterns, "fusion reads the annotations"),
        Step(Phase.FUSE, "fold_legalised_constants", fold_constants),
        Step(Phase.FUSE, "repeat_positions", repeat_positions),
        Step(Phase.FUSE, "keep_sizes_apart", keep_sizes_apart),
        Step(Phase.FUSE, "keep_chains_short", keep_chains_short),
        Step(Phase.FUSE, "fuse_operations", fuse_operations),
        Step(Phase.FUSE, "fuse_tir", stock(relax_pass.FuseTIR()), "a kernel is one PrimFunc"),
        # A reshape that nothing fused with is a view, not a kernel to tune.
        Step(Phase.FUSE, "reshapes_to_views", stock(relax_pass.RewriteDataflowReshape())),
        Step(Phase.FUSE, "fuse_norms", fuse_norms),
        Step(Phase.FUSE, "quantise_in_norms", quantise_in_norms),
        Step(Phase.FUSE, "keep_scores_in_cache", keep_scores_in_cache),
        Step(Phase.FUSE, "sum_in_blocks", sum_in_blocks),
        Step(
            Phase.FUSE,
            "remove_unused_functions",
            stock(relax_pass.DeadCodeElimination()),
            "unused PrimFuncs would be tuned",
        ),
        Step(Phase.FUSE, "lift_weights", lift_weights, "set embed_weights=True to keep weights inside the module"),
        Step(Phase.FUSE, "mark_constants", mark_constants),
        Step(Phase.FUSE, "mark_tf32", mark_tf32),
    )


def _plan_storage(mod: tvm.ir.IRModule, _context: tvm.transform.PassContext) -> tvm.ir.IRModule:
    """Share memory between tensors; not where there are branches: TVM gives one branch the storage of the other."""
    branches = any(find_all(function, relax.If) for _, function in mod.functions_items())
    planned: tvm.ir.IRModule = mod if branches else relax_pass.StaticPlanBlockMemory()(mod)
    return planned


def plan_memory_passes(target: tvm.target.Target, cuda_graph: bool) -> list[tvm.ir.transform.Pass]:
    """Return phase 7, run after the PrimFuncs are scheduled: explicit memory, its plan, the VM's own forms.

    `cuda_graph` captures the static regions of a CUDA module into graphs; run the passes inside a `PassContext` with
    `relax.backend.use_cuda_graph` set to the same value, which is what `RewriteCUDAGraph` reads.
    """
    return [
        relax_pass.ToNonDataflow(),
        relax_pass.RemovePurityChecking(),
        relax_pass.CallTIRRewrite(),
        tvm.transform.module_pass(_plan_storage, opt_level=0, name="StaticPlanBlockMemory"),
        *([relax_pass.RewriteCUDAGraph()] if cuda_graph and target.kind.name == "cuda" else []),
        relax_pass.LowerAllocTensor(),
        relax_pass.KillAfterLastUse(),
        relax_pass.LowerRuntimeBuiltin(),
        relax_pass.ComputePrimValue(),
        relax_pass.VMShapeLower(),
        relax_pass.AttachGlobalSymbol(),
    ]
