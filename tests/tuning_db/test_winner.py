"""One function says which record wins; its trace has each record once, with a reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.winner import Choice, Judged, Preferred, in_order, judge, left_aside, summary, winner

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def record(samples):
    numbers = iter(range(1, 100))

    def make(decision, *latencies_us, route=Route.TEMPLATE, minutes=0):
        return samples.record(
            decision=decision,
            latencies_us=latencies_us,
            route=route,
            created_at=NOW + timedelta(minutes=minutes),
            id=next(numbers),
        )

    return make


def judged(*records) -> Judged:
    return Judged(tuple(records))


def reasons(choice: Choice) -> dict[int, str]:
    assert len({one.id for one in choice.trace}) == len(choice.trace)
    return {one.id: one.reason for one in choice.trace}


def test_the_first_that_can_be_used_wins(record):
    stale, good, behind = record("a", 1.0), record("b", 2.0), record("c", 3.0)
    found = winner(judged(stale, good, behind), unusable=lambda one: "stale" if one is stale else None)
    assert (found.record, found.unusable, found.inside) == (good, (stale,), False)
    assert found.why == "faster records not usable (1): stale"
    assert reasons(found) == {1: "stale", 2: "taken", 3: "the record taken ranks higher"}
    assert [one.id for one in in_order(found.trace)] == [2, 1, 3]


def test_records_of_other_routes_are_left_aside(record):
    found = winner(judged(record("a", 1.0, route=Route.LIBRARY), record("b", 2.0)), routes=(Route.TEMPLATE,))
    assert found.record.decision == "b"
    assert reasons(found)[1] == "its route is switched off (--routes)"


@pytest.mark.parametrize("has_default", [True, False])
def test_default_schedules_alone_lose_to_the_default_of_a_template(record, has_default):
    measured = record("{}", 1.0, route=Route.FALLBACK)
    found = winner(judged(measured), has_default=lambda: has_default)
    assert found.record == (None if has_default else measured)
    assert found.why == ("no record of a candidate" if has_default else "")


def test_nothing_is_asked_where_there_is_no_record():
    found = winner(judged(), has_default=lambda: pytest.fail("a template is asked"))
    assert found == Choice(None, "no record", ())


def test_a_tie_goes_to_the_default_schedule(record):
    lucky, measured = record("a", 9.5), record("{}", 9.0, 10.0, 11.0, route=Route.FALLBACK)
    found = winner(judged(lucky, measured))
    assert found.record == measured
    assert found.why == "within noise, default kept: the fastest candidate took 9.5 us"
    assert reasons(found)[1].startswith("within the noise of the default schedule")


def test_a_default_schedule_behind_stale_records_loses_to_the_default_of_a_template(record):
    stale, measured = record("a", 1.0), record("{}", 9.0, route=Route.FALLBACK)
    found = winner(judged(stale, measured), unusable=lambda one: "stale", has_default=lambda: True)
    assert (found.record, found.unusable) == (None, (stale,))
    assert reasons(found)[2] == "faster records are stale; a template's first proposal is preferred"


@pytest.mark.parametrize(("minutes", "wins"), [(0, "b"), (2, "a")])
def test_the_models_own_kernel_wins_unless_a_faster_record_is_newer(record, minutes, wins):
    fast, slow = record("a", 1.0, minutes=minutes), record("b", 2.0)
    preferred = Preferred(Route.TEMPLATE, "b", NOW + timedelta(minutes=1))
    found = winner(judged(fast, slow), preferred=preferred)
    assert found.record.decision == wins
    assert found.inside == (wins == "b")
    assert summary(found.trace).startswith("record 2 (template, 2 us) is taken: the whole model") == found.inside


def test_only_the_first_records_are_tried(record):
    records = [record(str(number), 1.0 + number) for number in range(10)]
    found = winner(judged(*records), unusable=lambda _one: "stale")
    assert found.record is None
    assert len(found.unusable) == 8
    assert summary(found.trace) == (
        "no record taken; 8 not taken: stale; 2 not taken: 8 faster records could not be used; no more are tried"
    )


def test_doubted_records_are_in_the_trace_and_nothing_is_refuted_for_them(record, samples):
    found = judge(
        [record("a", 1.0)], samples.environment(), lambda: pytest.fail("refutations are read"), lambda _one: "no"
    )
    assert (found.standing, [one.reason for one in found.trace]) == ((), ["no"])


def test_a_model_that_ships_untuned_takes_no_record(record):
    trace = left_aside(winner(judged(record("a", 1.0))).trace, "untuned")
    assert [(one.taken, one.reason) for one in trace] == [(False, "untuned; alone, it ranks first")]
