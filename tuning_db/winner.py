"""The winner among the records of a kernel, and why: the one place that decides, for every caller and database.

    records true here ── judge ──▶ those that count, in order ── winner ──▶ Choice: a record or none, and the trace

The database gives the records that are true at a place, ranked by the rules of `tuning_db.lookup`. `judge` leaves out
impossible latencies, stale and refuted records, and measurements that were repeated. `winner` takes the first record of
the wanted routes that can be used. Each record that was looked at is in the trace, with the reason why it was kept or
left out. Both are functions of plain values: whoever makes kernels says by callbacks which records can be used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from relaxtune.tuning_db.lookup import WORKLOAD_ROUTES, Question, device_of, why_not_true
from relaxtune.tuning_db.records import Environment, Route, Status, TuningRecord

#: Records tried for one kernel, the best first, before it is made without a record.
RECORDS_TRIED = 8
# One kernel measured again may have been lucky before; what several have in common is the device's.
_DRIFTED_MIN = 2
# The smallest CPU kernels (a row of 128 floats) take 5.5 to 9 ns where many calls are timed together (measured, 2 cores
# of a Zen 5 EPYC). An empty kernel of a CUDA graph takes 1.3 to 2.5 us on an H100 or H200.
_CALL_US = {"cpu": 0.002, "cuda": 0.5}
# About ten times what the fastest device of today does, caches and 4-bit arithmetic included. Bytes are those of all
# parameters; a gather reads a part of them only.
_BYTES_PER_US = 1e9
_FLOPS_PER_US = 1e11
_TAKEN = "taken"

#: Gives the reason why a record is left out, None where it is kept.
Doubt = Callable[[TuningRecord], str | None]


def _none(_record: TuningRecord) -> None:
    return None


@dataclass(frozen=True)
class Considered:
    """A record that was looked at, and what became of it."""

    # Its number, and the database it is in where several lie over each other.
    id: int | None
    database: str | None
    route: Route
    status: Status
    latency_us: float | None
    device_name: str
    arch: str
    driver: str | None
    tvm_version: str
    code_version: str | None  # The relaxtune that measured it, with its commit where that is known.
    taken: bool  # Whether the kernel is made by it.
    reason: str  # Why it is taken or not.

    @classmethod
    def of(cls, record: TuningRecord, reason: str, *, taken: bool = False) -> Considered:
        """Return the entry of a record."""
        where = record.environment
        return cls(
            record.id, record.layer, record.route, record.status, record.latency_us, where.device_name,
            record.target.arch, where.driver, where.tvm_version, record.code_version, taken, reason,
        )  # fmt: skip


Trace = tuple[Considered, ...]


@dataclass(frozen=True)
class Judged:
    """The records of a kernel that count, the best first, and what became of the others."""

    standing: tuple[TuningRecord, ...]
    trace: Trace = ()


@dataclass(frozen=True)
class Preferred:
    """The decision with which the whole model was the fastest, and when that was measured."""

    route: Route
    decision: str
    made_at: datetime


@dataclass(frozen=True)
class Choice:
    """The record that makes a kernel."""

    record: TuningRecord | None  # None where no record makes it.
    why: str  # Why there is none, or which better ones could not be used; empty for the first one.
    trace: Trace  # Each record that was looked at.
    unusable: tuple[TuningRecord, ...] = ()  # Records that rank before it and cannot be used.
    inside: bool = False  # Whether it is taken since the whole model is faster with it.


def least_latency_us(flops: float, bytes_: float, device_kind: str) -> float:
    """Return microseconds that a kernel of so much work takes on any device of a kind (`cpu` or `cuda`)."""
    return max(_CALL_US.get(device_kind, 0.0), bytes_ / _BYTES_PER_US, flops / _FLOPS_PER_US)


def impossible_latency(record: TuningRecord, flops: float, bytes_: float) -> str | None:
    """Return what is wrong with a latency that no device reaches; None where nothing is."""
    least_us = least_latency_us(flops, bytes_, record.environment.device_kind)
    if record.latency_us is None or record.latency_us >= least_us:
        return None
    return f"its latency is {record.latency_us:.3g} us, and no device takes less than {least_us:.3g} us"


def judge(
    records: Sequence[TuningRecord],
    environment: Environment,
    refuted: Callable[[], Sequence[TuningRecord]] = tuple,
    doubt: Doubt = _none,
) -> Judged:
    """Return the records that count, the best first, those of this device before all others.

    A decision measured again on the same device, in a final or by force, counts with its newest measurement, here and
    for whoever uses that device's records elsewhere; one whose newest measurement here was a wrong result does not
    count at all. A kernel measured once counts as if it had become slower since by as much as the others (`drift`).

    `records` are valid ones, ranked as `TuningDatabase.list_top` ranks them. `refuted` returns the records of wrong
    results of the same kernel (`TuningDatabase.list_failed`) if there is anything to refute. `doubt` leaves out records
    that no other measurement speaks against.
    """
    held, dropped = [], []
    for record in records:
        reason = doubt(record)
        if reason is None:
            held.append(record)
        else:
            dropped.append(Considered.of(record, reason))
    if not held:
        return Judged((), tuple(dropped))
    newest: dict[tuple[object, ...], TuningRecord] = {}
    for record in held:
        key = _measured(record)
        if key not in newest or record.created_at > newest[key].created_at:
            newest[key] = record
    wrong: set[tuple[object, ...]] = set()
    for record in refuted():
        key = _measured(record)
        # Of equal times the refutation counts: it may have been given the time of what it refutes.
        if key not in newest or record.created_at >= newest[key].created_at:
            newest[key] = record
            wrong.add(key)
    here = device_of(environment)
    standing = []
    for record in held:
        # A refutation on this device counts for measurements of all.
        if wrong & {_measured(record), (here, record.route, record.decision)}:
            dropped.append(Considered.of(record, "refuted: its decision gave a wrong result later"))
        elif record is not newest[_measured(record)]:
            dropped.append(Considered.of(record, "the same decision was measured again later"))
        else:
            standing.append(record)
    ranked = _in_order([record for record in standing if device_of(record.environment) == here], held)
    others = [record for record in standing if device_of(record.environment) != here]
    # Architectures stay in their order.
    for _, group in groupby(others, key=lambda record: record.target):
        ranked += _in_order(list(group), held)
    return Judged(tuple(ranked), tuple(dropped))


def winner(
    judged: Judged,
    *,
    routes: Iterable[Route] = Route,
    preferred: Preferred | None = None,
    unusable: Doubt = _none,
    has_default: Callable[[], bool] = lambda: False,
) -> Choice:
    """Return which record makes a kernel, and what became of each that was looked at.

    The decision `preferred` is faster inside the model; it loses to a faster record that is newer. `unusable` says why
    a record does not make the kernel that was measured, None where it does. `has_default` says whether a template makes
    the kernel without a record: its first proposal goes before the default schedules where nothing else was measured,
    or where all that was faster is stale.
    """
    trace = list(judged.trace)

    def drop(records: Iterable[TuningRecord], reason: str) -> None:
        trace.extend(Considered.of(record, reason) for record in records)

    wanted = frozenset(routes)
    offered = [record for record in judged.standing if record.route in wanted]
    drop(_without(judged.standing, offered), "its route is switched off (--routes)")
    if all(record.route is Route.FALLBACK for record in offered) and (not offered or has_default()):
        # A run that ended early measured the fallback alone: that says nothing against a template.
        drop(offered, "only default schedules were measured; a template's first proposal is preferred")
        return Choice(None, "no record of a candidate" if offered else "no record", tuple(trace))
    inside = []
    # Unless the fastest was measured since.
    if preferred is not None and offered and offered[0].created_at <= preferred.made_at:
        decided = (preferred.route, preferred.decision)
        inside = [record for record in offered if (record.route, record.decision) == decided]
    distinct = without_ties(offered)
    tied = _without(offered, [*distinct, *inside])
    drop(tied, "within the noise of the default schedule")
    ranked = [*inside, *_without(distinct, inside)]
    stale: list[tuple[TuningRecord, str]] = []
    for number, record in enumerate(ranked[:RECORDS_TRIED]):
        if record.route is Route.FALLBACK and stale and has_default():
            # The faster record used an older schedule: the new one is more likely faster still than slower than this.
            drop(ranked[number:], "faster records are stale; a template's first proposal is preferred")
            break
        reason = unusable(record)
        if reason is not None:
            stale.append((record, reason))
            drop([record], reason)
            continue
        of_model = record in inside
        why = "the whole model is faster with it" if of_model else ""
        trace.append(Considered.of(record, f"{_TAKEN}: {why}" if why else _TAKEN, taken=True))
        drop(ranked[number + 1 :], "the record taken ranks higher")
        note = "faster inside the model than alone" if of_model else _passed_over(stale)
        faster_us = tied[0].latency_us if tied else None
        if not note and record.route is Route.FALLBACK and faster_us and faster_us < (record.latency_us or 0.0):
            note = f"within noise, default kept: the fastest candidate took {faster_us:.3g} us"
        return Choice(record, note, tuple(trace), tuple(one for one, _ in stale), of_model)
    else:
        drop(ranked[RECORDS_TRIED:], f"{RECORDS_TRIED} faster records could not be used; no more are tried")
    return Choice(None, _passed_over(stale), tuple(trace), tuple(one for one, _ in stale))


def not_in_answer(question: Question, records: Iterable[TuningRecord], answer: Sequence[TuningRecord]) -> Trace:
    """Return why records of a kernel, or of one with its signature, are not in the answer to a question."""
    answered = {(record.layer, record.id) for record in answer}
    found: dict[tuple[str | None, int | None], Considered] = {}
    for record in records:
        if (record.layer, record.id) in answered:
            continue
        reason = why_not_true(question.target, question.environment, record)
        if reason is None and record.workload_hash != question.workload_hash and record.route in WORKLOAD_ROUTES:
            reason = f"of a similar workload; route {record.route} needs the same workload"
        if reason is None and record.status is not Status.OK:
            reason = f"the candidate failed: {record.status}"
        reason = reason or f"more than {len(answer)} records are faster"
        found.setdefault((record.layer, record.id), Considered.of(record, reason))
    return tuple(found.values())


def in_order(trace: Trace) -> Trace:
    """Return a trace for readers: the record taken, then valid ones by latency, then failed ones."""
    return tuple(
        sorted(trace, key=lambda one: (not one.taken, one.latency_us is None, one.latency_us or 0.0, one.id or 0))
    )


def left_aside(trace: Trace, why: str) -> Trace:
    """Return a trace with the record that was taken left out for a reason."""
    return tuple(
        replace(one, taken=False, reason=f"{why}; alone, it ranks first") if one.taken else one for one in trace
    )


def summary(trace: Trace) -> str:
    """Return a trace as one line: the record taken, and how many were left out for each reason."""
    taken = next((one for one in trace if one.taken), None)
    first = "no record taken"
    if taken is not None:
        first = f"record {taken.id} ({taken.route}, {taken.latency_us:.4g} us) is {taken.reason}"
    counts = Counter(one.reason for one in trace if not one.taken)
    return "; ".join([first, *(f"{count} not taken: {reason}" for reason, count in counts.most_common())])


def _passed_over(stale: Sequence[tuple[TuningRecord, str]]) -> str:
    reasons = "; ".join(reason for _, reason in stale)
    return f"faster records not usable ({len(stale)}): {reasons}" if stale else ""


def _without(before: Sequence[TuningRecord], others: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return the records of `before` that are not among others, in their order."""
    kept = {id(record) for record in others}
    return [record for record in before if id(record) not in kept]


def without_ties(records: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return the records less those whose median is within the spread that the fallback's own latencies show.

    The best of many equal candidates is the luckiest; such a tie goes to the fallback, which needs no replay.
    """
    fallback = next((record for record in records if record.route is Route.FALLBACK), None)
    if fallback is None:
        return list(records)
    fastest_us = min(fallback.latencies_us)
    return [record for record in records if record is fallback or (record.latency_us or 0.0) < fastest_us]


def drift(again: Iterable[tuple[float, float]]) -> float:
    """Return how many times slower a device has become, at least 1, by latencies before and after.

    The first candidates of a run meet a cool device. When those near the best are measured again, a card at its power
    limit takes up to a tenth longer. A candidate that was measured only before the change was 8 % slower than the best
    then, and seemed 4 % faster (attention of Llama-1B 1x2048 on an H200: 47.6 us beside 44.2, which took 49.6 again).

    `again` has latencies of several kernels, each before and after. The least change is what all of them share.
    """
    changes = [after / before for before, after in again]
    return max(1.0, min(changes)) if len(changes) >= _DRIFTED_MIN else 1.0


def _in_order(standing: Sequence[TuningRecord], records: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return records by what they come to today, given all records of the kernel."""
    drifts = {device: _drift_of(device, records) for device in {device_of(record.environment) for record in standing}}

    def latency_us(record: TuningRecord) -> float:
        factor, since = drifts[device_of(record.environment)]
        earlier = since is not None and record.created_at < since
        return (record.latency_us or 0.0) * (factor if earlier else 1.0)

    return sorted(standing, key=latency_us)


def _drift_of(device: tuple[object, ...], records: Sequence[TuningRecord]) -> tuple[float, datetime | None]:
    """Return how much slower a device has become, and since when."""
    decisions = defaultdict(list)
    for record in records:
        if device_of(record.environment) == device and record.latency_us:
            decisions[record.route, record.decision].append(record)
    again = [sorted(group, key=lambda one: one.created_at) for group in decisions.values() if len(group) > 1]
    factor = drift((min(one.latency_us or 0.0 for one in group[:-1]), group[-1].latency_us or 0.0) for group in again)
    return factor, min((group[-1].created_at for group in again), default=None)


def _measured(record: TuningRecord) -> tuple[object, ...]:
    """Return what a record measures: which decision, on which device."""
    return device_of(record.environment), record.route, record.decision
