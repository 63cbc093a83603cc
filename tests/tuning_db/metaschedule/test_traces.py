"""Stored traces and modules: what is replayed, what is refused."""

from __future__ import annotations

import itertools
import json

import pytest
import tvm
import tvm_ffi

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.metaschedule import ir_from_json, ir_to_json, replay_decision, trace_to_json, workload_hash
from tests.tuning_db.metaschedule.matmul_case import matmul, split

BAD_DECISIONS = [
    "not json",
    '"text"',
    "{}",
    '[["a"]]',
    '[[["NoSuch",[],[],[]]],[]]',
    '[[["GetSBlock",[],["Q","main"],["b0"]]],[]]',
    '[[["GetSBlock",[],["C","main"],["b0"]],["Vectorize",["b0"],[],[]]],[]]',
    '[[["GetSBlock",[],["C","main"],["b0"]],["GetLoops",["b0"],[],["l1","l2","l3"]],["Fuse",["l3","l1"],[1],["l4"]]],[]]',
]


@pytest.mark.parametrize("decision", BAD_DECISIONS)
def test_replay_is_refused_when_the_decision_does_not_fit(decision):
    with pytest.raises(InvalidRecordError, match=r"cannot replay a stored trace on workload \d+ .*tune the task again"):
        replay_decision(matmul(), decision)


def nested_splits(count: int) -> str:
    """Return the trace of one loop that is split again and again."""
    instructions = [["GetSBlock", [], ["C", "main"], ["b0"]], ["GetLoops", ["b0"], [], ["l1", "l2", "l3"]]]
    loops = ["l1", *(f"l{4 + 2 * i}" for i in range(count))]
    instructions += [
        ["Split", [outer, None, 1], [1, 0], [inner, f"l{5 + 2 * i}"]]
        for i, (outer, inner) in enumerate(itertools.pairwise(loops))
    ]
    return json.dumps([instructions, []])


def test_a_trace_that_takes_too_long_to_apply_is_given_up():
    with pytest.raises(InvalidRecordError, match=r"longer than 0\.01 s to apply: \d+ of 122 instructions"):
        replay_decision(matmul(), nested_splits(120), limit_s=0.01)
    assert len(replay_decision(matmul(), nested_splits(20)).trace.insts) == 22


def test_a_trace_of_very_many_instructions_is_not_read():
    with pytest.raises(InvalidRecordError, match=r"has 10002 instructions, expected at most 500"):
        replay_decision(matmul(), nested_splits(10000))


def test_module_comes_back_from_json_with_its_hash():
    again = ir_from_json(ir_to_json(matmul()))
    assert tvm_ffi.structural_equal(again, matmul())
    assert workload_hash(again) == workload_hash(matmul())
    assert workload_hash(matmul(32)) != workload_hash(matmul())


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"root_index":0}'])
def test_ir_is_refused_when_it_is_not_a_module(text):
    with pytest.raises(InvalidRecordError, match="cannot read the IR of a workload"):
        ir_from_json(text)


def test_ir_is_refused_when_it_is_another_object():
    with pytest.raises(InvalidRecordError, match="expected an IRModule"):
        ir_from_json(tvm.ir.save_json(tvm.tirx.IntImm("int32", 1)))


def test_trace_json_has_plain_values():
    instructions, decisions = json.loads(trace_to_json(split(matmul()).trace))
    assert [instruction[0] for instruction in instructions] == ["GetSBlock", "GetLoops", "Split"]
    assert decisions == []
