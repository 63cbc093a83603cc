from __future__ import annotations

import json
from pathlib import Path

import pytest
import tvm
from tvm import te, tirx

from benchmarks.tuning.bench_tuning_stock import (
    compare,
    count_needed,
    describe,
    export,
    prepare,
    read_document,
    summarise,
    time_in_turns,
)
from relaxtune.schedules.targets import resolve_target


def kernel(number: int, calls: int, chosen: dict[int, str] | None = None, final: bool = True) -> dict[str, object]:
    named = {f"{number}-{name}.so": after for after, name in (chosen or {}).items()}
    return {"name": f"k{number}", "calls": calls, "chosen": named, "final": f"{number}-final.so" if final else None}


OURS = [kernel(0, 2, {0: "0", 3: "3"}), kernel(1, 1, {0: "0", 5: "5"})]
LATENCIES = {
    ("ours", "0-0.so"): 10.0, ("ours", "0-3.so"): 4.0, ("ours", "0-final.so"): 4.0,
    ("ours", "1-0.so"): 8.0, ("ours", "1-5.so"): 2.0, ("ours", "1-final.so"): 2.0,
    ("stock", "0-final.so"): 5.0, ("stock", "1-final.so"): 6.0,
}  # fmt: skip


@pytest.mark.parametrize(("goal", "needed"), [(28.0, 0), (27.9, 3), (16.0, 3), (15.9, 5), (10.0, 5), (9.9, None)])
def test_needed_counts_candidates_until_the_kernels_chosen_so_far_are_as_fast(goal, needed):
    assert count_needed(OURS, LATENCIES, goal, candidates=6) == needed


def results(stock: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    return {
        "stock": {"seconds": 50.0, "candidates": 6, "valid": 6, "kernels": stock},
        "ours": {"seconds": 4.0, "candidates": 6, "valid": 6, "kernels": OURS},
    }


def test_compare_sums_calls_times_latency_and_leaves_out_what_stock_found_nothing_for():
    both = compare(results([kernel(0, 2), kernel(1, 1)]), LATENCIES)
    assert (both["stock_us"], both["ours_us"], both["wall_ratio"], both["needed"]) == (16.0, 10.0, 12.5, 3)
    one = compare(results([kernel(0, 2), kernel(1, 1, final=False)]), LATENCIES)
    assert (one["stock_us"], one["ours_us"], one["kernels_without_valid_stock_candidate"]) == (10.0, 8.0, 1)
    none = compare(results([kernel(0, 2, final=False), kernel(1, 1, final=False)]), LATENCIES)
    assert none["latency_ratio"] is None
    assert none["needed"] is None


def test_summary_has_medians_with_extremes():
    arms = results([kernel(0, 2), kernel(1, 1)])
    run = {"model": "m", "seed": 1, "arms": arms, **compare(arms, LATENCIES)}
    assert "12.5 times as fast" in describe(run)
    assert "12.50 (10.00 to 12.50)" in summarise("m", [run, run, {**run, "wall_ratio": 10.0}])


def test_document_of_other_trials_is_refused(tmp_path: Path):
    path = tmp_path / "out.json"
    assert read_document(path, 4)["runs"] == []
    path.write_text(json.dumps({"trials_per_kernel": 4, "runs": [1]}))
    assert read_document(path, 4)["runs"] == [1]
    with pytest.raises(SystemExit, match="--trials 4, asked for is 5"):
        read_document(path, 5)


def test_arms_have_the_same_kernels_in_the_same_order():
    plain = prepare("bert-tiny", frozenset({"pack_weights"}))[1]
    packed = prepare("bert-tiny", frozenset())[1]
    assert len(plain) >= 3
    assert [task.onnx_nodes for task in plain] == [task.onnx_nodes for task in packed]
    assert [task.workload_hash for task in plain] != [task.workload_hash for task in packed]


def test_every_library_is_timed_in_every_turn(tmp_path: Path):
    a = te.placeholder((64,), "float32", name="A")
    func = te.create_prim_func([a, te.compute((64,), lambda i: a[i] + tirx.const(1.0, "float32"))])
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    for name in ("x.so", "y.so"):
        export(module, resolve_target("llvm").target, tmp_path / name)
    latencies = time_in_turns({("stock", "x.so"): tmp_path / "x.so", ("ours", "y.so"): tmp_path / "y.so"})
    assert all(len(values) == 7 and min(values) > 0 for values in latencies.values())
