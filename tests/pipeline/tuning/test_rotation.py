from __future__ import annotations

import pytest

from pipeline.tuning.rotation import can_rotate, launches, sets_needed

L2 = 50 << 20


@pytest.mark.parametrize(("size", "sets"), [(1 << 10, 32), (10 << 20, 11), (200 << 20, 2)])
def test_copies_together_pass_twice_the_l2(size: int, sets: int) -> None:
    assert sets_needed(size, L2) == sets
    assert sets == 32 or sets * size > 2 * L2


def test_a_copy_comes_twice_only_when_the_others_evict_it() -> None:
    assert launches(1 << 10, 32, L2, quick_s=3e-6, min_repeat_s=0.004) == 32
    assert launches(10 << 20, 11, L2, quick_s=1e-5, min_repeat_s=0.004) == 400
    assert launches(10 << 20, 11, L2, quick_s=1.0, min_repeat_s=0.004) == 1


def test_the_binding_of_the_cuda_extra_is_found() -> None:
    assert can_rotate()
