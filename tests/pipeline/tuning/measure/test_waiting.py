"""Work that waits for devices: the order of a plain search through all of it, at any size."""

from __future__ import annotations

import random
import time

from relaxtune.pipeline.tuning.measure.side_by_side import WaitingWork, _Work


def work_of(workload: str, rank: tuple[int, int]) -> _Work:
    return _Work(workload, lambda _: None, lambda _: None, rank)


def test_each_device_takes_what_a_search_through_everything_would_give_it() -> None:
    for seed in range(20):
        draws = random.Random(seed)
        devices = [object() for _ in range(3)]
        waiting = WaitingWork()
        plain: list[_Work] = []
        begun: dict[str, int] = {}
        homes: dict[str, object] = {}
        for number in range(400):
            if draws.random() < 0.55:
                name = f"w{draws.randrange(12)}"
                place = begun.setdefault(name, len(begun))
                first = draws.random() < 0.3 or name not in {one.workload for one in plain} | homes.keys()
                work = work_of(name, (0, place) if first else (1, number))
                waiting.put(work)
                plain.append(work)
                continue
            if draws.random() < 0.02:
                gone = draws.choice(devices)
                waiting.leave(gone)
                homes = {name: home for name, home in homes.items() if home is not gone}
                continue
            device, held = draws.choice(devices), {f"w{draws.randrange(12)}" for _ in range(3)}
            free = [one for one in plain if one.workload not in held]
            expected = min(
                free, key=lambda one: (homes.get(one.workload, device) is not device, one.rank), default=None
            )
            assert waiting.take(device, held.__contains__) is expected
            if expected is not None:
                plain.remove(expected)
                homes.setdefault(expected.workload, device)
            assert bool(waiting) == bool(plain)
            assert all(waiting.has(name) == any(one.workload == name for one in plain) for name in held)
        assert {*waiting.take_all()} == {*plain}
        assert not waiting


def test_a_choice_among_twenty_thousand_is_quick() -> None:
    waiting, devices = WaitingWork(), [object() for _ in range(64)]
    for number in range(20_000):
        waiting.put(work_of(f"w{number % 10_000}", (number // 10_000, number)))
    began = time.thread_time()
    for number in range(2_000):
        assert waiting.take(devices[number % 64], lambda _: False) is not None
    # A search through all of them takes 3 ms for each.
    assert time.thread_time() - began < 1.0
