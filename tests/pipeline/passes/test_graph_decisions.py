"""Decisions of the lowering as options of it: what they change, and what an artifact says of them."""

from __future__ import annotations

import pytest

from relaxtune.models import load_model
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.graph_decisions import DECISIONS, decision_notes, with_decisions
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.passes.order import lowering_steps
from relaxtune.schedules.targets import resolve_target


def lowered(options: LoweringOptions, target: str = "cuda:sm_90a") -> LoweredModule:
    graph = import_model(load_model("bert-tiny", shapes={"input_ids": (1, 16)}))
    return lower(graph, resolve_target(target).target, options)


def test_every_decision_is_about_an_optional_pass() -> None:
    optional = {step.name for step in lowering_steps() if not step.required and not step.makes_precision}
    assert {one.pass_name for one in DECISIONS} <= optional
    assert len({one.name for one in DECISIONS}) == len(DECISIONS)


def test_decisions_are_offered_where_their_pass_did_something() -> None:
    on_gpu = {one.name for one in DECISIONS if one.may_change(lowered(LoweringOptions("fp16")))}
    assert {"norms apart", "Q, K and V apart", "look-ups apart"} <= on_gpu
    assert not {"gates apart", "weights not packed"} & on_gpu
    on_cpu = {one.name for one in DECISIONS if one.may_change(lowered(LoweringOptions(), "llvm"))}
    assert "weights not packed" in on_cpu
    assert not {"norms apart", "norms in all matmuls", "rotary in all matmuls"} & on_cpu


def test_a_pass_that_is_switched_off_or_decided_is_not_offered_again() -> None:
    options = with_decisions(LoweringOptions("fp16", frozenset({"combine_matmuls"})), {"norms apart": "5 % faster"})
    offered = {one.pass_name for one in DECISIONS if one.may_change(lowered(options))}
    assert not {"combine_matmuls", "fuse_norms"} & offered
    assert decision_notes(options, "fuse_norms") == ("norms apart: 5 % faster",)
    assert decision_notes(options, "combine_matmuls") == ()


def test_a_decision_of_another_version_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert with_decisions(LoweringOptions(), {"cats apart": "faster"}) == LoweringOptions()
    assert "cats apart" in caplog.text
