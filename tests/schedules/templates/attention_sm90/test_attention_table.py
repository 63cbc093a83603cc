from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tvm
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.attention.sizes import with_values
from relaxtune.schedules.templates.attention_sm90.plan import AttentionParameters, AttentionPlan, make_plan
from relaxtune.schedules.templates.attention_sm90.table import AttentionTable, Line, TableParameters
from relaxtune.schedules.templates.attention_sm90.template import predicted_cycles, propose_for
from relaxtune.schedules.templates.base import TemplateError, cuda_limits
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates.cubin import captured_cubins, read_cubin

BATCH, LENGTH, PAST = (tirx.Var(name, "int64") for name in ("batch", "length", "past"))
BERT = AttentionCase(BATCH, 12, LENGTH, LENGTH, 64, dtype="float16", packed=True)
SMALL = AttentionParameters(consumers=1, block_k=64, stages=2)
MANY = AttentionParameters(consumers=2, block_k=128, stages=2)
TABLE = TableParameters((SMALL, MANY), (Line((("batch", 1), ("length", 64)), 0), Line((), 1)))


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def function(case: AttentionCase) -> tirx.PrimFunc:
    return attention_function(*case.made())


def test_table_serves_every_point_with_a_few_kernels(target: ResolvedTarget) -> None:
    spec, limits = BERT.made()[0], cuda_limits(target)
    (table,), _ = list_candidates(function(BERT), target)
    assert isinstance(table, TableParameters)
    assert 1 < len(table.kernels) <= 5
    assert table.lines[-1].most == ()
    for batch, length in ((1, 128), (8, 512), (32, 64), (4, 200)):
        sizes = {"batch": batch, "length": length}
        line = next(line for line in table.lines if all(sizes[name] <= most for name, most in line.most))
        known = with_values(spec, sizes)
        chosen, best = (
            make_plan(known, p, limits) for p in (table.kernels[line.kernel], propose_for(known, limits, 0)[0])
        )
        assert isinstance(chosen, AttentionPlan)
        assert isinstance(best, AttentionPlan)
        assert predicted_cycles(chosen, limits) <= 1.3 * predicted_cycles(best, limits), sizes


def test_measured_kernels_take_their_own_sizes_alone(target: ResolvedTarget) -> None:
    func, table = function(BERT), AttentionTable()
    (untuned,), _ = list_candidates(func, target)
    assert isinstance(untuned, TableParameters)
    place = table.place(func, {"batch": 8, "length": 100})
    assert place == (("batch", 8), ("length", 100))
    offered = table.lines(func, target, place)
    assert not isinstance(offered, Refusal)
    assert len(offered) > 3
    winner = next(one.to_json() for one in offered if one not in untuned.kernels)
    assert {table.refusal(func, target, one.to_json(), place) for one in offered} == {None}
    found = untuned.with_measured({place: winner})
    assert found.at(place) == winner
    assert {found.at((("batch", 8), ("length", length))) == winner for length in (101, 512)} == {False}
    for sizes in ((1, 64), (9, 100), (64, 1024), (1000, 5000)):
        elsewhere = tuple(zip(("batch", "length"), sizes, strict=True))
        assert found.at(elsewhere) == untuned.at(elsewhere)
    assert isinstance(table.apply(func, target, found), tirx.PrimFunc)
    too_many = AttentionParameters(consumers=3, block_k=128, stages=24)
    assert isinstance(table.refusal(func, target, too_many.to_json(), place), Refusal)


def test_three_blocks_share_a_multiprocessor_under_a_mask_of_padding(target: ResolvedTarget) -> None:
    """As with known lengths: 128 registers a thread are enough."""
    case = replace(BERT, bias=("add", "float16", (BATCH, 1, 1, LENGTH)))  # type: ignore[arg-type]
    (table,), _ = list_candidates(function(case), target)
    assert isinstance(table, TableParameters)
    shared = [kernel for kernel in table.kernels if kernel.residents == 3]
    assert shared
    for kernel in shared:
        made = AttentionTable().apply(function(case), target, TableParameters((kernel,), (Line((), 0),)))
        assert isinstance(made, tirx.PrimFunc)
        with captured_cubins("sm_90a") as cubins:
            tvm.tirx.build(
                tvm.IRModule({"main": made.with_attr("global_symbol", "main")}),
                target=target.target,
                pipeline=register_mixed_pipeline(),
            )
        assert read_cubin(cubins[0]).frame_bytes == 0


def test_table_is_one_function_with_a_kernel_each_and_a_check_of_sizes(target: ResolvedTarget) -> None:
    func = function(BERT)
    made = AttentionTable().apply(func, target, TABLE)
    assert isinstance(made, tirx.PrimFunc)
    text = made.script()
    # Maps of Q, K, V and O for each kernel.
    assert text.count("cuTensorMapEncodeTiled") == 4 * 2
    assert "more than 2147483647 elements; make smaller batches" in text
    assert [str(param.name) for param in made.params] == [str(param.name) for param in func.params]


def test_parse_reads_a_decision() -> None:
    assert AttentionTable().parse(TABLE.to_json()) == TABLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"template": "ranges"}, "not of template 'attention_sm90_table'"),
        ({"lines": [{"most": {}}]}, 'the number of a "kernel"'),
        ({"lines": [{"most": {}, "kernel": 2}]}, "one of the 2 kernels"),
        ({"lines": [{"most": {"batch": 1}, "kernel": 0}]}, "the last one without bounds"),
    ],
)
def test_parse_says_what_is_wrong_with_a_decision(change: dict[str, object], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        AttentionTable().parse(json.dumps({**json.loads(TABLE.to_json()), **change}))


def test_bound_of_a_variable_that_is_not_there_is_an_error(target: ResolvedTarget) -> None:
    table = replace(TABLE, lines=(Line((("sequence", 64),), 0), Line((), 1)))
    with pytest.raises(TemplateError, match=r"bounds \['sequence'\], the function has \['batch', 'length'\]"):
        AttentionTable().apply(function(BERT), target, table)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (replace(BERT, batch=1, queries=128, keys=128), "its sizes are known"),
        (replace(BERT, head_dim=20), "head_dim is 20"),
        (
            AttentionCase(1, 4, LENGTH, PAST + LENGTH, 64, dtype="float16", past=PAST),
            "caches grow by a symbolic number of positions",
        ),
        (
            replace(BERT, packed=False, heads=1, kv_heads=1, bias=("add", "int32", (BATCH, 1, 1, LENGTH))),  # type: ignore[arg-type]
            "the add mask is int32",
        ),
    ],
)
def test_functions_that_no_table_is_made_for(case: AttentionCase, message: str, target: ResolvedTarget) -> None:
    for found in (
        AttentionTable().candidates(function(case), target),
        AttentionTable().apply(function(case), target, TABLE),
    ):
        assert isinstance(found, Refusal)
        assert message in found.reason


@pytest.mark.parametrize("parameters", [replace(SMALL, block_k=256, residents=2), replace(MANY, stages=8)])
def test_table_says_which_kernel_does_not_fit(parameters: AttentionParameters, target: ResolvedTarget) -> None:
    found = AttentionTable().apply(function(BERT), target, TableParameters((parameters,), (Line((), 0),)))
    assert isinstance(found, Refusal)
    assert "registers" in found.reason or "shared memory" in found.reason
