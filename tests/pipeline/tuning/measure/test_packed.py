"""Artifacts go packed to another machine, and one that comes damaged is no fault of a candidate."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.backend import build_all, pack, place
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
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
    packed = pack(code)
    assert 2 * len(packed) < len(code)
    assert Path(str(place(BuiltArtifact(packed, built.artifact.sha256), tmp_path).content)).read_bytes() == code


@pytest.mark.parametrize("damage", ["cut off", "changed", "not packed", "other code"])
def test_damaged_bytes_are_a_fault_of_the_machine(damage: str, tmp_path: Path) -> None:
    code = bytes(range(256)) * 16
    packed = pack(code)
    damaged = {
        "cut off": packed[:-3],
        "changed": packed[:-1] + bytes([packed[-1] ^ 1]),
        "not packed": code,
        "other code": pack(code[1:]),
    }[damage]
    with pytest.raises(OSError, match="a built artifact came damaged"):
        place(BuiltArtifact(damaged, hashlib.sha256(code).hexdigest()), tmp_path)
    assert list(tmp_path.iterdir()) == []
