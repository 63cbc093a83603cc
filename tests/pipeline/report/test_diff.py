"""Two builds beside each other: which kernels are a pair, what changed, and the times of both."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from relaxtune.pipeline.report.diff import KernelChange, diff_reports
from relaxtune.pipeline.report.kernel import KernelRow
from relaxtune.pipeline.report.page import render_page
from relaxtune.pipeline.report.report import Report


def row(
    name: str, nodes: tuple[str, ...], time_us: float | None, calls: int = 1, kernel_hash: str | None = None
) -> KernelRow:
    return KernelRow(name, "norm", nodes, calls, "fallback", None, time_us=time_us, kernel_hash=kernel_hash)


def report(*rows: KernelRow, source: str = "out/a", target: str = "llvm x", device: str = "a CPU") -> Report:
    return Report("model", source, target, device, rows, datetime(2026, 1, 1, tzinfo=UTC))


def names(change: KernelChange) -> tuple[list[str], list[str]]:
    return [one.name for one in change.before], [one.name for one in change.after]


def test_kernels_pair_by_name_and_nodes_when_one_origin_has_two() -> None:
    before = report(row("part", ("/mm",), 4.0), row("sum", ("/mm",), 1.0))
    after = report(row("sum", ("/mm",), 2.0), row("part", ("/mm",), 4.0))
    assert [names(one) for one in diff_reports(before, after).changes] == [(["sum"], ["sum"]), (["part"], ["part"])]


def test_fused_kernels_stand_beside_those_they_were_made_of() -> None:
    before = report(
        row("mm", ("/mm",), 5.0, calls=2), row("norm", ("/add", "/norm"), 3.0), row("gelu", ("/gelu",), 1.0)
    )
    after = report(
        row("mm_add", ("/mm", "/add"), 6.0, calls=2), row("norm2", ("/norm",), 2.0), row("act", ("/gelu",), 1.0)
    )
    fused, act = diff_reports(before, after).changes
    assert names(fused) == (["mm", "norm"], ["mm_add", "norm2"])
    assert (fused.before_us, fused.after_us, fused.difference_us) == (13.0, 14.0, 1.0)
    assert fused.what == "other kernels for these nodes"
    assert names(act) == (["gelu"], ["act"])
    assert act.times == 1.0


def test_every_kernel_is_in_one_change_and_sums_are_those_of_the_reports() -> None:
    before = report(*(row(f"k{n}", (f"/{n % 3}", f"/x{n}"), 1.0 + n) for n in range(9)))
    after = report(*(row(f"m{n}", (f"/{n % 2}", f"/y{n}"), 2.0 + n) for n in range(7)))
    changes = diff_reports(before, after).changes
    assert sorted(one.name for change in changes for one in change.before) == sorted(one.name for one in before.kernels)
    assert sum(change.before_us or 0.0 for change in changes) == pytest.approx(before.kernels_us)
    assert sum(change.after_us or 0.0 for change in changes) == pytest.approx(after.kernels_us)


def test_kernels_on_one_side_are_new_or_gone() -> None:
    changes = diff_reports(report(row("old", ("/a",), 3.0)), report(row("young", ("/b",), 2.0))).changes
    assert {change.what: (change.before_us, change.after_us, change.times) for change in changes} == {
        "gone": (3.0, 0.0, None),
        "new": (0.0, 2.0, None),
    }


@pytest.mark.parametrize(
    ("was", "now", "what"),
    [
        ({"kernel_hash": "a"}, {"kernel_hash": "a"}, "the same kernel"),
        ({"kernel_hash": "a"}, {"kernel_hash": "a", "calls": 3}, "1 calls before, 3 now"),
        ({"kernel_hash": "a"}, {"kernel_hash": "b"}, "another kernel"),
        ({"kernel_hash": "a"}, {"kernel_hash": "b", "route": "template"}, "fallback before, template now"),
        ({}, {}, ""),
        ({}, {"route": "template"}, "fallback before, template now"),
    ],
)
def test_what_became_of_a_kernel_goes_by_its_hash(was: dict[str, object], now: dict[str, object], what: str) -> None:
    one = row("k", ("/a",), 1.0)
    (change,) = diff_reports(
        report(dataclasses.replace(one, **was)),  # type: ignore[arg-type]
        report(dataclasses.replace(one, **now)),  # type: ignore[arg-type]
    ).changes
    assert change.what == what


def test_what_cannot_be_compared_is_told() -> None:
    before = report(row("k", ("/a",), None), target="cuda sm_90a", device="GPU 1")
    diff = diff_reports(before, report(row("k", ("/a",), 1.0), device="GPU 2"))
    assert diff.changes[0].difference_us is None
    told = " ".join(diff.notes)
    assert "two targets: cuda sm_90a before, llvm x after" in told
    assert "two devices: GPU 1 before, GPU 2 after" in told
    assert "1 of 1 kernels before have no time" in told


def test_the_page_has_names_once_where_they_are_the_same_and_escapes_them() -> None:
    same, renamed = row("<b>same", ("/a",), 2.0), row("first", ("/c",), 4.0)
    diff = diff_reports(
        report(same, renamed, source="out/<old>"),
        report(same, dataclasses.replace(renamed, name="second", time_us=1.0)),
    )
    page = render_page([diff.after], diff)
    assert "<b>same" not in page
    assert "out/<old>" not in page
    assert page.count("&lt;b&gt;same</code>") == 2  # in the diff, and in the table of kernels
    assert "<td>-3</td><td>4.00</td>" in page
    assert "Times are of all calls." in page
    assert "times of" not in render_page([dataclasses.replace(diff.after, device=None)])


def test_the_page_tells_nothing_of_times_where_there_are_none() -> None:
    untimed = report(row("k", ("/a",), None))
    diff = diff_reports(untimed, untimed)
    page = render_page([diff.after], diff)
    assert "Times are of" not in page
    assert "times as fast" not in page


def test_times_of_the_same_kernels_that_differ_are_the_machines() -> None:
    same = row("k", ("/a",), 10.0, kernel_hash="a")
    slower = dataclasses.replace(same, time_us=15.0)
    (note,) = diff_reports(report(same), report(slower)).notes
    assert "equal kernels (1) took 10 us before and 15 us after" in note
    assert diff_reports(report(same), report(dataclasses.replace(slower, kernel_hash="b"))).notes == ()
    assert diff_reports(report(same), report(dataclasses.replace(slower, time_us=10.5))).notes == ()


def test_buckets_that_both_have_are_set_beside_each_other() -> None:
    def bucketed(name: str, time_us: float) -> Report:
        return dataclasses.replace(report(row("k", ("/a",), time_us)), model=f"model [{name}]", bucket=name)

    before = dataclasses.replace(report(row("k", ("/a",), 9.0)), buckets=(bucketed("n=4", 5.0), bucketed("n=8", 7.0)))
    after = dataclasses.replace(report(row("k", ("/a",), 9.0)), buckets=(bucketed("n=16", 6.0), bucketed("n=4", 2.0)))
    diff = diff_reports(before, after)
    (of_four,) = diff.buckets
    assert of_four.changes[0].difference_us == -3.0
    assert diff.notes == ("the bucket n=8 is only before", "the bucket n=16 is only after")
    assert diff.to_json()["buckets"] == [of_four.to_json()]
    assert of_four.to_json()["bucket"] == "n=4"
    assert "<h1>model [n=4], before and after</h1>" in render_page([diff.after], diff)
