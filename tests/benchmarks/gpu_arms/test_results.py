"""The GPU table: ratios, geometric means, what is missing, and the file that a cut run leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.gpu_arms.results import best_peer, notes, overall, ratio, read_entries, table, write_results


def arm(median: float, device: float) -> dict[str, float]:
    return {"median_ms": median, "p95_ms": median * 1.1, "device_median_ms": device}


FAST = {"case": "a", "arms": {"relaxtune": arm(1.0, 0.9), "max-autotune": arm(2.0, 1.8), "ort": arm(3.0, 1.2)}}
SLOW = {"case": "b", "arms": {"relaxtune": arm(4.0, 4.0), "eager-graph": arm(2.0, 1.0)}, "skipped": {"ort": "not here"}}
ALONE = {"case": "c", "arms": {"eager-graph": arm(2.0, 1.0)}, "skipped": {"relaxtune": "no artifact"}}
DEAD = {"case": "d", "failed": "its process ended with code -11", "skipped": {}}


def test_the_ratio_is_of_the_fastest_peer_by_each_clock() -> None:
    assert best_peer(FAST) == ("max-autotune", 2.0)
    assert best_peer(FAST, "device_median_ms") == ("ort", 1.2)
    assert ratio(FAST) == 2.0
    assert ratio(FAST, "device_median_ms") == pytest.approx(1.2 / 0.9)


def test_a_case_without_our_arm_or_without_a_peer_has_no_ratio() -> None:
    assert ratio(ALONE) is None
    assert ratio(DEAD) is None
    assert ratio({"case": "e", "arms": {"relaxtune": arm(1.0, 1.0)}}) is None


def test_the_geometric_mean_is_over_cases_with_both_sides() -> None:
    means = overall([FAST, SLOW, ALONE, DEAD])
    assert means["cases"] == 2
    assert means["host_clock"] == pytest.approx((2.0 * 0.5) ** 0.5)
    assert overall([DEAD]) == {"host_clock": None, "device": None, "cases": 0}


def test_the_table_shows_every_case_and_the_notes_say_what_is_missing() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table([FAST, SLOW, ALONE, DEAD]))
    text = console.export_text()
    assert "1.000 (1.100)" in text
    assert "geometric mean of 2" in text
    assert notes([FAST, SLOW, ALONE, DEAD]) == [
        "b: no ort: not here",
        "c: no relaxtune: no artifact",
        "d: its process ended with code -11",
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    assert read_entries(path) == []
    write_results(path, {"machine": {"gpu": "none"}}, [FAST])
    write_results(path, {"machine": {"gpu": "none"}}, [FAST, DEAD])
    assert read_entries(path) == [FAST, DEAD]
    document = json.loads(path.read_text())
    assert document["geometric_mean_of_ratios"]["host_clock"] == 2.0
    assert [entry.name for entry in path.parent.iterdir()] == ["x.json"]
