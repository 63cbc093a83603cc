"""Which records of a kernel count when it was measured more than once."""

from __future__ import annotations

from collections.abc import Sequence

from tuning_db.lookup import DeviceRank, device_rank
from tuning_db.records import Environment, Route, TuningRecord


def standing_records(
    records: Sequence[TuningRecord], environment: Environment, refuted: Sequence[TuningRecord] = ()
) -> list[TuningRecord]:
    """Return the records that count, the best first.

    A decision measured again on the same device, in a final or by force, counts with its newest measurement; one whose
    newest measurement was a wrong result does not count at all.

    Parameters
    ----------
    records : sequence of TuningRecord
        Valid ones, ranked as `TuningDatabase.list_top` ranks them.
    environment : Environment
        Where the kernel is to run.
    refuted : sequence of TuningRecord
        Records of wrong results of the same kernel.
    """
    newest: dict[tuple[Route, str], TuningRecord] = {}
    for record in [*records, *refuted]:
        key = (record.route, record.decision)
        here = device_rank(environment, record.environment) is DeviceRank.SAME_DEVICE
        if here and (key not in newest or record.created_at > newest[key].created_at):
            newest[key] = record
    wrong = {id(record) for record in refuted}
    here_first, elsewhere = [], []
    for record in records:
        latest = newest.get((record.route, record.decision))
        if device_rank(environment, record.environment) is DeviceRank.SAME_DEVICE:
            if record is latest:
                here_first.append(record)
        elif latest is None or id(latest) not in wrong:
            elsewhere.append(record)
    return sorted(here_first, key=lambda record: record.latency_us or 0.0) + elsewhere
