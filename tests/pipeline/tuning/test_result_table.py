from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from relaxtune.pipeline.printable import short
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.options import TuningSummary
from relaxtune.pipeline.tuning.progress import ConsoleProgress, ProgressEvent, UntilTheEnd, describe, estimate_left
from relaxtune.pipeline.tuning.result_table import shorten_nodes, summary_table, to_data
from relaxtune.pipeline.tuning.search.template_search import TemplateSearch
from relaxtune.pipeline.tuning.tasks import Tasks, TaskState
from relaxtune.tuning_db.records import Route
from tests.pipeline.tuning.tuning_cases import Place, choose_among, matmul_task, recorded, settled_task

TASK = settled_task()
SUMMARY = TuningSummary((TASK,), 4.0, {"search": 1.0, "build": 2.0}, interrupted=True, restarts=3)
EVENT = ProgressEvent("matmul", 8, 16, 6, 2, 25.0, 30.0)


def test_table_shows_the_figures() -> None:
    text = io.StringIO()
    Console(file=text, width=200).print(summary_table(SUMMARY))
    shown = text.getvalue()
    for part in (
        "matmul_node",
        "metaschedule",
        "6/2",
        "100.0",
        "25.0 ±2%",
        "4.00x",
        "100.0%",
        "settled, 2 timeout, 3 known",
    ):
        assert part in shown
    assert "8 candidates in 4.0 s (2.00/s), interrupted" in shown
    assert "1.200 ms with default schedules, 0.300 ms with the best records" in shown
    assert "search 1.0 s, build 2.0 s; 3 processes replaced" in shown


def test_table_without_tasks_says_that_there_was_nothing_to_tune() -> None:
    text = io.StringIO()
    Console(file=text, width=200).print(summary_table(dataclasses.replace(SUMMARY, tasks=())))
    assert "nothing to tune" in text.getvalue()
    assert "candidates" not in text.getvalue()


def test_table_shows_dashes_when_nothing_is_known() -> None:
    text = io.StringIO()
    empty = dataclasses.replace(TASK, before_us=None, after_us=None, route=None, skipped="no reference")
    Console(file=text, width=200).print(summary_table(dataclasses.replace(SUMMARY, tasks=(empty,))))
    assert "none" in text.getvalue()
    assert "no reference" in text.getvalue()


def test_to_data_has_every_status_and_all_nodes() -> None:
    assert json.loads(json.dumps(to_data(SUMMARY))) == to_data(SUMMARY)
    tasks = to_data(SUMMARY)["tasks"]
    assert isinstance(tasks, list)
    task = tasks[0]
    assert task["failures"] == {"build_error": 0, "run_error": 0, "timeout": 2, "wrong_result": 0}
    assert task["speedup"] == 4.0


def test_shorten_nodes_keeps_the_ends_of_names() -> None:
    assert shorten_nodes(("a", "b", "c")) == "a b +1"
    cut = shorten_nodes(("/encoder/layer.0/attention/self/query/MatMul",))
    assert cut.startswith("…")
    assert cut.endswith("query/MatMul")


def test_progress_prints_plain_lines_off_a_terminal() -> None:
    text = io.StringIO()
    with ConsoleProgress(Console(file=text)) as progress:
        progress.show(EVENT)
        progress.show(dataclasses.replace(EVENT, done=9))
        progress.show(dataclasses.replace(EVENT, done=16, best_us=None))
    lines = text.getvalue().splitlines()
    assert lines[0] == "tuning 8/16 matmul: best 25.0 us; 6 valid, 2 failed, about 30 s left"
    assert lines[1].startswith("tuning 16/16 matmul: nothing valid yet")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("done", "total", "budget_left", "expected"),
    [(0, 10, None, None), (5, 10, None, 20.0), (5, 10, 7.0, 7.0), (5, None, 7.0, 7.0), (5, None, None, None)],
)
def test_estimate_left_takes_the_limit_that_comes_first(
    done: int, total: int | None, budget_left: float | None, expected: float | None
) -> None:
    assert estimate_left(done, total, 20.0, budget_left) == expected


@pytest.mark.parametrize(("seconds", "text"), [(59.0, "59 s"), (240.0, "4 min"), (5400.0, "1.5 h")])
def test_describe_tells_the_time_left(seconds: float, text: str) -> None:
    assert describe(dataclasses.replace(EVENT, seconds_left=seconds)).endswith(f"about {text} left")
    assert "left" not in describe(dataclasses.replace(EVENT, seconds_left=None))


def test_progress_draws_a_bar_on_a_terminal() -> None:
    text = io.StringIO()
    with ConsoleProgress(Console(file=text, force_terminal=True, width=120)) as progress:
        progress.show(EVENT)
    assert "8/16" in text.getvalue()


def state(weight: int, progress: list[float | None], before_us: float | None = None, seconds: float = 0.0) -> TaskState:
    made = TaskState(dataclasses.replace(matmul_task(), weight=weight), ready=True, before_us=before_us)
    made.progress, made.best_us = progress, progress[-1] if progress else None
    made.rounds, made.seconds = len(progress), seconds
    return made


def test_choose_task_takes_what_is_unknown_then_follows_the_gain() -> None:
    heavy, light, new = state(10, [50.0]), state(1, [50.0]), state(1, [])
    assert choose_among([heavy, light, new]) is new
    assert choose_among([heavy, light]) is heavy
    settled, improving = state(1, [50.0] * 9), state(1, [90.0, 70.0, 60.0, 50.0])
    assert choose_among([settled, improving]) is improving
    heavy.ended = "exhausted"
    assert choose_among([heavy]) is None
    assert choose_among([dataclasses.replace(new, ready=False)]) is None


def test_choose_task_weighs_the_gain_by_the_seconds_it_costs() -> None:
    slow, quick = state(3, [50.0], seconds=30.0), state(1, [50.0], seconds=1.0)
    assert choose_among([slow, quick]) is quick
    # A small kernel that was never searched promises less than a large one that was.
    assert choose_among([state(12, [100.0], seconds=1.0), state(1, [], before_us=2.0)]).task.weight == 12


def test_a_final_keeps_the_best_few() -> None:
    task = state(1, [])
    dropped = [task.keep(recorded(Route.TEMPLATE, str(us), us)) for us in (17.0, 11.0, 15.0, 14.0, 12.0, 13.0, 16.0)]
    assert [round(one.latency_us, 6) for one in task.contenders] == [11.0, 12.0, 13.0, 14.0, 15.0, 16.0]
    assert [[round(one.latency_us, 6) for one in gone] for gone in dropped] == [[], [], [], [], [], [], [17.0]]


def test_a_final_keeps_nothing_that_is_twice_as_slow_but_the_default() -> None:
    task = state(1, [])
    given = [(Route.FALLBACK, 90.0), (Route.TEMPLATE, 30.0), (Route.TEMPLATE, 9.0), (Route.TEMPLATE, 20.0)]
    dropped = [task.keep(recorded(route, str(us), us)) for route, us in given]
    assert [round(one.latency_us, 6) for one in task.contenders] == [9.0, 90.0]
    assert [[round(one.latency_us, 6) for one in gone] for gone in dropped] == [[], [], [30.0], [20.0]]


def test_a_task_is_left_alone_when_a_round_promises_too_little(place: Place) -> None:
    task = state(1, [50.0] * 10)
    assert task.expected_gain_us() == pytest.approx(1.0)

    def reason(min_gain: float, others_us: float, templates: TemplateSearch | None = None) -> str | None:
        task = state(1, [50.0] * 10)
        task.ready, task.best_us, task.templates = True, 50.0, templates
        tasks = Tasks(min_gain=min_gain)
        tasks.add([TaskState(matmul_task(32, 32, 32, "other"), best_us=others_us), task])
        return task.ended

    assert reason(0.001, 450.0) is None
    assert "save about 1.00 of 5000 us" in str(reason(0.001, 4950.0))
    assert reason(0.0, 4950.0) is None
    offered = [Candidate(Route.TEMPLATE, f'{{"template":"made_up","tile":{n}}}') for n in (1, 2)]
    assert reason(0.001, 4950.0, TemplateSearch(offered, {})) is None


def test_time_left_counts_what_follows_the_search() -> None:
    class Noted:
        def __init__(self) -> None:
            self.left: list[float | None] = []

        def __call__(self, event: ProgressEvent) -> None:
            self.left.append(event.seconds_left)

    noted = Noted()
    for left in (20.0, None):
        UntilTheEnd(noted, 12.0)(dataclasses.replace(EVENT, seconds_left=left))
    assert noted.left == [32.0, None]


def test_names_are_shortened_on_screens_with_their_sizes_kept() -> None:
    name = "fused_cast_arange_expand_dims_greater_equal_reshape_where1"
    assert short("layer_norm[batch=1]") == "layer_norm[batch=1]"
    assert short(name) == "fused_cast_arange_ex…qual_reshape_where1"
    assert len(short(name)) == 40
    assert short(f"{name}[batch=1]") == f"{short(name)}[batch=1]"
