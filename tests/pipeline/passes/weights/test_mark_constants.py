from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import tvm
from tvm import relax, tirx

from relaxtune.models import load_model
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.weights.mark_constants import mark_constants
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR, INPUT_PARAMS_ATTR, OWN_OUTPUTS_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route
from tests.pipeline.passes.pass_cases import graph_of, small_model

HOPPER = resolve_target("cuda:sm_90a")
_DEPENDENT = "tirx.use_programtic_dependent_launch"
_WAIT = 'griddepcontrol("wait"'


@pytest.fixture(scope="module")
def lowered() -> LoweredModule:
    graph = import_model(load_model("bert-tiny", shapes={"input_ids": (1, 64)}))
    return lower(graph, HOPPER.target, LoweringOptions(precision="fp16"))


def marks_of(functions: Mapping[str, tvm.ir.BaseFunc]) -> dict[str, list[int]]:
    found = {}
    for name, func in functions.items():
        if isinstance(func, tirx.PrimFunc) and CONSTANT_PARAMS_ATTR in (func.attrs or {}):
            found[name] = [int(position) for position in func.attrs[CONSTANT_PARAMS_ATTR]]
    return found


def test_mark_constants_marks_weights_and_nothing_else(lowered: LoweredModule) -> None:
    marks = marks_of({name: lowered.mod[name] for name in lowered.kernels})
    matmuls = [name for name in lowered.kernels if "matmul" in name]
    assert matmuls
    for name in matmuls:
        params = lowered.mod[name].params
        positions = marks[name]
        assert 0 not in positions  # the activation
        assert len(params) - 1 not in positions  # the output
        assert 1 in positions  # the weight
    # The first of them with a residual also writes sums for the norm after it.
    residual = next(name for name in matmuls if "add" in name and len(lowered.mod[name].params) == 6)
    assert marks[residual] == [1, 2]  # weight and bias, not the residual


def test_mark_constants_reaches_the_tuning_tasks(lowered: LoweredModule) -> None:
    by_name = {name: lowered.mod[name] for name in lowered.kernels}
    tasks = {name: task.mod["main"] for task in extract_tasks([lowered]) for name in task.functions["bert-tiny"]}
    assert marks_of(tasks) == marks_of(by_name)


def test_mark_constants_leaves_kernels_unmarked_when_one_call_reads_an_activation() -> None:
    def build(b: relax.BlockBuilder, x: relax.Var, w: relax.Var) -> relax.Expr:
        first = b.emit(relax.op.matmul(x, w))
        return relax.op.matmul(first, first)

    graph = graph_of(build, {"x": ((4, 4), "float32"), "w": ((4, 4), "float32")})
    with HOPPER.target:
        mod = relax.transform.LegalizeOps()(graph.mod)
    state = LoweringState(graph, HOPPER.target, LoweringOptions())
    assert marks_of({var.name_hint: func for var, func in mark_constants(mod, state).functions_items()}) == {}
    one_input = LoweringState(
        graph_of(lambda b, x: relax.op.add(x, x), {"x": ((4, 4), "float32")}), HOPPER.target, LoweringOptions()
    )
    marked = marks_of({var.name_hint: func for var, func in mark_constants(mod, one_input).functions_items()})
    assert marked == {}, "the second matmul reads an activation where the first reads a weight"


def test_mark_constants_marks_caches_that_are_inputs() -> None:
    graph = import_model(small_model("llama-tiny-decode", precision="fp16"))
    lowered = lower(graph, HOPPER.target, LoweringOptions())
    attentions = [lowered.mod[name] for name in lowered.kernels if spec_of(lowered.mod[name]) is not None]
    assert attentions
    for func in attentions:
        growth = spec_of(func).growth
        assert {growth.past_key.param, growth.past_value.param} <= set(func.attrs[INPUT_PARAMS_ATTR])
        assert {spec_of(func).key.param, spec_of(func).value.param} == set(func.attrs[OWN_OUTPUTS_ATTR])
        # The queries are an activation.
        assert spec_of(func).query.param not in set(func.attrs[INPUT_PARAMS_ATTR])
    others = [lowered.mod[name] for name in lowered.kernels if spec_of(lowered.mod[name]) is None]
    assert not any(INPUT_PARAMS_ATTR in (func.attrs or {}) for func in others)


@pytest.mark.parametrize(
    ("target", "options"),
    [("llvm", LoweringOptions()), ("cuda:sm_90a", LoweringOptions(disabled_passes=frozenset({"mark_constants"})))],
)
def test_mark_constants_leaves_kernels_alone_when_nothing_reads_it(target: str, options: LoweringOptions) -> None:
    graph = import_model(load_model("bert-tiny", shapes={"input_ids": (1, 16)}))
    lowered = lower(graph, resolve_target(target).target, options)
    assert marks_of({name: lowered.mod[name] for name in lowered.kernels}) == {}


def test_templates_wait_in_every_kernel_with_dependent_launch(lowered: LoweredModule) -> None:
    """The rule that `mark_constants` rests on."""
    tasks = extract_tasks([lowered])
    choices = select_kernels(lowered, tasks, database=None, target=HOPPER, environment=detect_environment(HOPPER))
    dependent = [
        choice
        for choice in choices
        if choice.route is Route.TEMPLATE
        and choice.scheduled is not None
        and _DEPENDENT in list(choice.scheduled.attrs.get("tirx.kernel_launch_params", []))
    ]
    assert {json.loads(choice.decision or "{}")["template"] for choice in dependent} >= {"gemm_sm90"}
    for choice in dependent:
        assert _WAIT in choice.scheduled.script(), choice.function
