from __future__ import annotations

from benchmarks.tuning.bench_tuning_gain import table


def test_table_has_a_column_an_effort_and_the_mean_of_what_ships() -> None:
    common = {"model": "a", "untuned_ms": 2.0}
    gain = {"median": 0.2, "least": 0.1, "most": 0.3}
    rows = [
        {**common, "effort": "quick", "gain": {**gain, "median": -0.1, "least": -0.2}, "ships": "untuned"},
        {**common, "effort": "thorough", "gain": gain, "ships": "tuned"},
        {**common, "model": "b", "effort": "thorough", "gain": None, "ships": "untuned"},
        {"model": "c", "effort": "thorough", "failed": "no disk"},
    ]
    assert table(rows).splitlines() == [
        "| model | untuned ms | quick | thorough |",
        "|---|---|---|---|",
        "| a | 2 | -10.0% (-20.0% to +30.0%), untuned ships | +20.0% (+10.0% to +30.0%) |",
        "| b | 2 |  | 0 (same kernels) |",
        "| c |  |  | failed |",
        "| geometric mean of what ships | | +0.0% | +10.6% |",
    ]
