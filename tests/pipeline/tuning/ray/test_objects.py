"""Artifacts lie packed in Ray's object store, and what comes damaged is no fault of a candidate."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.backend import build_all
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
from relaxtune.pipeline.tuning.ray.objects import ArtifactStore, packed, unpacked
from relaxtune.schedules.targets import ResolvedTarget
from tests.pipeline.tuning.tuning_cases import add_one_mod


def test_a_built_kernel_comes_back_from_half_of_its_bytes(tmp_path: Path, llvm_target: ResolvedTarget) -> None:
    pool = BuildPool(1, tmp_path)
    try:
        (built,) = build_all(pool, [add_one_mod()], llvm_target.target)
        assert built.artifact is not None
        code = Path(str(built.artifact.content)).read_bytes()
    finally:
        pool.close()
    kept = packed(code)
    assert unpacked(kept) == code
    assert 2 * len(kept) < len(code)


@pytest.mark.parametrize("damage", ["cut off", "changed", "not packed"])
def test_damaged_bytes_are_a_fault_of_the_machine(damage: str) -> None:
    code = bytes(range(256)) * 16
    kept = packed(code)
    damaged = {"cut off": kept[:-3], "changed": kept[:-1] + bytes([kept[-1] ^ 1]), "not packed": code}[damage]
    with pytest.raises(OSError, match="came damaged out of Ray's object store"):
        unpacked(damaged)


def test_an_artifact_that_carries_its_bytes_is_packed_too() -> None:
    code = b"code" * 100
    kept = ArtifactStore().find(BuiltArtifact(code, "0" * 64))
    assert isinstance(kept, bytes)
    assert unpacked(kept) == code
