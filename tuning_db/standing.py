"""Which latency of a kernel counts when it was measured more than once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby

from relaxtune.tuning_db.lookup import device_of
from relaxtune.tuning_db.records import Environment, Route, TuningRecord

# One kernel measured again may have been lucky before; what several have in common is the device's.
_DRIFTED_MIN = 2


def standing_records(
    records: Sequence[TuningRecord], environment: Environment, refuted: Sequence[TuningRecord] = ()
) -> list[TuningRecord]:
    """Return the records that count, the best first, those of this device before all others.

    A decision measured again on the same device, in a final or by force, counts with its newest measurement, here and
    for whoever uses that device's records elsewhere; one whose newest measurement here was a wrong result does not
    count at all. What was measured once counts as if it had become slower since by as much as the others (`drift`).

    Parameters
    ----------
    records : sequence of TuningRecord
        Valid ones, ranked as `TuningDatabase.list_top` ranks them.
    environment : Environment
        Where the kernel is to run.
    refuted : sequence of TuningRecord
        Records of wrong results of the same kernel, found as `TuningDatabase.list_failed` finds them.
    """
    newest: dict[tuple[object, ...], TuningRecord] = {}
    for record in records:
        key = _measured(record)
        if key not in newest or record.created_at > newest[key].created_at:
            newest[key] = record
    for record in refuted:
        key = _measured(record)
        # Of equal times the refutation counts: it may have been given the time of what it refutes.
        if key not in newest or record.created_at >= newest[key].created_at:
            newest[key] = record
    here = device_of(environment)
    wrong = {key for key, record in newest.items() if any(record is one for one in refuted)}
    standing = [
        record
        for record in records
        if record is newest[_measured(record)] and (here, record.route, record.decision) not in wrong
    ]
    ranked = _in_order([record for record in standing if device_of(record.environment) == here], records)
    others = [record for record in standing if device_of(record.environment) != here]
    # Architectures stay in their order.
    for _, group in groupby(others, key=lambda record: record.target):
        ranked += _in_order(list(group), records)
    return ranked


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

    Parameters
    ----------
    again : iterable of (float, float)
        Latencies of several kernels, each before and after. The least change is what all of them share.
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
