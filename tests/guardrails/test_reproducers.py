"""The graphs that an independent trial found wrong or refused: why it could be, what rules the class out, which test.

Every test that the table names exists. A case is `A` for a wrong number and `B` for a model that did not come in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Case:
    """A reproducer.

    Attributes
    ----------
    name, what
        Its place in the list, and the graph.
    cause
        The mechanism that allowed it.
    now
        What makes the class impossible, or shows it.
    tests
        `file::test` below `tests/`.
    """

    name: str
    what: str
    cause: str
    now: str
    tests: tuple[str, ...]


_INDEXING = "pipeline/importer/converters/shapes/test_indexing.py::"
_LEGAL = "pipeline/passes/test_legalise.py::"
_MISSES = "pipeline/passes/test_near_misses.py::"
_RANDOM = "guardrails/test_graphs.py::test_twelve_random_graphs_agree_with_onnx_runtime"
CASES = (
    Case(
        "A1", "attention whose values have another width than its keys", "one width was read for both, of the values",
        "tensors have a width each, in the recogniser, the plan and the kernel",
        ("pipeline/passes/attention/test_recognise_attention.py::"
         "test_template_makes_latent_attention_of_an_export_of_any_size",
         "schedules/templates/attention_sm90/test_attention_sm90.py::test_plan_sizes_shared_memory_by_both_widths"),
    ),
    Case(
        "A2", "softmax over an axis as long as a kept one", "axes were told apart by their sizes",
        "by their indices; half of the random graphs have equal sizes",
        ("schedules/cpu/test_reduction.py::test_softmax_matches_numpy_when_the_reduced_axis_is_as_long_as_a_kept_one",
         _RANDOM),
    ),
    Case(
        "A3", "scatters smaller than the data, TopK above its axis, lost NaN, slices of one, scalars, two vectors",
        "TVM's converters and its arithmetic on numbers differ from ONNX at these edges",
        "own converters and kernels; special numbers are never folded",
        (_INDEXING + "test_scatter_elements_covers_a_corner",
         _INDEXING + "test_top_k_of_a_shorter_axis_leaves_nothing_unwritten",
         "pipeline/passes/test_legalise_reductions.py::test_the_least_and_the_greatest_keep_a_nan_and_infinities",
         "pipeline/passes/test_legalise_reductions.py::"
         "test_reductions_of_no_elements_at_run_time_are_those_of_onnx_runtime",
         _INDEXING + "test_slice_of_one_element_at_its_edges", _INDEXING + "test_product_of_two_vectors_is_a_scalar",
         _LEGAL + "test_nan_comes_out", _LEGAL + "test_number_beside_a_tensor_is_no_real_number",
         _LEGAL + "test_nan_is_not_equal_to_itself",
         "pipeline/artifact/test_scalar_inputs.py::test_scalar_input_reaches_the_module"),
    ),
    Case(
        "A4", "patterns with constants that broadcast, or are a bit off", "a constant was read without its shape",
        "one reader of constants takes the shape into account; near misses of each pattern are drawn",
        (_MISSES + "test_a_near_miss_agrees_with_onnx_runtime",
         "guardrails/test_graphs.py::test_a_near_miss_of_each_pattern_agrees_with_onnx_runtime"),
    ),
    Case(
        "A5", "chains in half precision between casts", "fusion computes a chain in float32 and rounds once",
        "float16 is rounded at each step; the report says where bfloat16 is",
        ("pipeline/passes/precision/test_half_chains.py::test_float16_is_rounded_at_each_operation",
         "pipeline/passes/precision/test_half_chains.py::"
         "test_bfloat16_stays_near_and_the_report_says_where_it_is_rounded"),
    ),
    Case(
        "A6", "quantised weights around 1e-6; matmuls without a name",
        "scales underflow in float16; weights were found by the names of nodes",
        "such weights stay as they are; weights are found by what reads them",
        ("pipeline/passes/weights/test_quantise_weights.py::"
         "test_weights_too_small_for_a_scale_in_half_stay_in_half",
         "pipeline/passes/weights/test_quantise_weights.py::test_matmul_without_a_name_is_quantised"),
    ),
    Case(
        "A7", "wrong outputs that are small", "the absolute tolerance had a floor of 1",
        "it is a share of the output's own size; docs/validation.md says what each check cannot see",
        ("pipeline/validate/test_validation.py::test_a_wrong_output_fails_however_small_it_is",
         "pipeline/validate/test_tolerances.py::test_the_scale_is_the_root_mean_square_however_small"),
    ),
    Case(
        "A8", "buckets whose padding changes the answer", "padding was tried with friendly numbers",
        "it is tried with numbers of either sign in the padding, and is called a test",
        ("pipeline/artifact/test_bucket_routing.py::test_a_maximum_of_what_is_positive_is_not_padded",
         "pipeline/artifact/test_bucket_routing.py::test_call_with_a_row_that_hides_all_places_is_not_padded",
         "pipeline/artifact/test_bucket_routing.py::test_call_without_rows_is_refused_by_the_name_of_its_axis"),
    ),
    Case(
        "A9", "outputs that are weights or inputs; rows of a mask that see no key",
        "outputs were handed out as they are held; a sum of no weights was divided by 0",
        "outputs are copies; such rows are NaN or finite, as the graph has it",
        ("pipeline/artifact/test_shared_outputs.py::test_outputs_written_by_the_caller_change_nothing",
         "schedules/functions/test_attention.py::test_row_without_keys_is_nan_and_others_are_not",
         "pipeline/passes/attention/test_recognise_attention.py::"
         "test_recognise_attention_reads_a_causal_mask_whose_first_queries_see_no_key"),
    ),
    Case(
        "B1", "RMS norms of two columns", "a row of two was taken for the two statistics of a row",
        "ranks and extents are compared before elements; rows of two are in the random graphs",
        (_MISSES + "test_norms_of_two_rows_or_columns_are_lowered_for_hopper", _RANDOM),
    ),
    Case(
        "B2", "decoders with caches and symbolic axes", "each symbolic axis was drawn alone",
        "relations between axes are found in the graph, inputs satisfy them, `inspect` lists them",
        ("models/axes/test_relations.py::test_decoder_with_a_name_for_every_axis_gets_one_name_for_each_size",
         "models/axes/test_relations.py::test_mask_indexed_up_to_a_sum_has_that_length",
         "pipeline/jobs/test_inspect.py::test_relations_between_axes_are_listed"),
    ),
    Case(
        "B3", "mixtures of experts", "sizes known at run time stood beside sizes of the graph",
        "a broadcast says which size they are, checked at run time",
        ("pipeline/importer/test_sizes.py::test_parts_of_rows_joined_again_are_as_many_as_there_were",
         "pipeline/importer/test_sizes.py::"
         "test_size_that_is_computed_gives_way_to_that_of_a_constant",
         "pipeline/importer/converters/test_clip.py::test_bounds_are_those_of_onnx_runtime"),
    ),
    Case(
        "B4", "graphs that ONNX Runtime wrote", "onnx's checker is stricter than ONNX Runtime",
        "stale types give way, nodes are sorted, its operators are known in the standard domain",
        ("models/test_loading.py::test_nodes_out_of_order_are_sorted_as_onnx_runtime_does",
         "models/test_loading.py::test_stale_types_of_values_give_way_to_the_operators",
         "models/test_loading.py::test_norm_that_onnx_runtime_writes_into_the_standard_domain_is_loaded",
         "pipeline/importer/converters/test_contrib_converters.py::test_embedding_without_a_mask_counts_no_tokens"),
    ),
    Case(
        "B5", "every axis symbolic", "TVM does not see that equal products are equal",
        "free sizes are products without what both sides share; floor divisions of sizes are sizes",
        (_INDEXING + "test_free_size_of_a_reshape_is_no_quotient_of_sums",
         _INDEXING + "test_floor_division_of_a_size_is_a_size"),
    ),
    Case(
        "B6", "passes that fail on valid graphs", "a pass's failure ended the compilation",
        "it is logged and the pipeline goes on; tests make it fatal",
        ("pipeline/passes/test_failing_passes.py::test_lower_goes_on_without_a_pass_that_fails_and_says_so",
         "pipeline/importer/converters/test_norms_and_reductions.py::test_layer_norm_whose_scale_and_bias_broadcast",
         "pipeline/importer/test_forms_stock_lacks.py::"
         "test_a_symbolic_axis_is_read_from_the_last_element_to_the_first",
         "pipeline/jobs/test_inspect.py::test_model_whose_memory_cannot_be_planned_is_refused_as_compile_refuses_it"),
    ),
    Case(
        "B7", "graphs that are ill-conditioned on inputs drawn", "an error was judged without what rounding alone does",
        "ONNX Runtime is asked how far it moves; small integers are drawn by their use",
        ("pipeline/validate/test_validation.py::"
         "test_a_graph_that_cancels_passes_and_a_wrong_one_of_that_kind_says_how_wrong",
         "models/test_inputs.py::test_index_range_is_found"),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_reproducer_has_the_tests_that_the_table_names(case: Case) -> None:
    for named in case.tests:
        file, _, test = named.partition("::")
        assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE), named


def test_no_reproducer_is_missing() -> None:
    assert [case.name for case in CASES] == [f"A{n}" for n in range(1, 10)] + [f"B{n}" for n in range(1, 8)]
