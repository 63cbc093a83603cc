"""The determinism contract: what is promised, why, and that it is kept."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.artifact.determinism import describe_determinism, uses_atomics
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.manifest import parse_manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ValidationFailedError
from relaxtune.pipeline.validate.array_comparison import differing_bits
from relaxtune.pipeline.validate.report import RepeatReport
from relaxtune.pipeline.validate.validation import Observation, repeat_runs, validate
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route
from tests import warm_python

RUN = """
import sys, numpy
from pathlib import Path
from relaxtune.pipeline.artifact.module import Module
artifact, inputs, outputs, threads = sys.argv[1:]
module = Module.load(artifact, threads=int(threads))
numpy.savez(outputs, **module.run(dict(numpy.load(inputs))))
"""


def plain() -> tirx.PrimFunc:
    a = tvm.te.placeholder((8,), "float32")
    return tvm.te.create_prim_func([a, tvm.te.compute((8,), lambda i: a[i] + 1.0)])


def with_instruction(text: str) -> tirx.PrimFunc:
    call = tirx.call_extern("int32", text)
    func = plain()
    return func.with_body(tirx.SeqStmt([tirx.Evaluate(call), func.body]))


def test_a_cpu_artifact_promises_equal_bits_for_any_number_of_threads(artifact: Path) -> None:
    entry = load_manifest(artifact).deterministic
    assert entry is not None
    assert entry.bitwise
    assert entry.any_threads is True
    assert entry.rests_on[0].startswith("no atomic operation in ")
    again = load_manifest(artifact)
    assert parse_manifest(again.to_json(), "again").deterministic == entry


def test_the_same_inputs_give_the_same_bits_again(artifact: Path, bert_tiny: OnnxModel) -> None:
    report = validate(artifact, bert_tiny, samples=2, repeats=4)
    assert report.repeats == RepeatReport(runs=4, differing={}, poisoned=True, promised=True)
    assert json.loads(json.dumps(report.to_json()))["repeats"]["identical"] is True
    assert validate(artifact, bert_tiny, samples=1, repeats=1).repeats is None


def test_bits_do_not_depend_on_the_number_of_threads(
    artifact: Path, bert_inputs: dict[str, np.ndarray], tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", **bert_inputs)
    outputs = {}
    for threads in (1, 2):
        path = tmp_path / f"y{threads}.npz"
        command = [sys.executable, "-c", RUN, str(artifact), str(tmp_path / "x.npz"), str(path), str(threads)]
        assert warm_python.run(command, cwd=Path(__file__).parents[3]).returncode == 0
        outputs[threads] = dict(np.load(path))
    assert all(not differing_bits(outputs[1][name], outputs[2][name]) for name in outputs[1])


def test_outputs_that_change_fail_where_equal_bits_are_promised(artifact: Path, bert_tiny: OnnxModel) -> None:
    module = Module.load(artifact)
    seen = validate(module, bert_tiny, samples=1, repeats=1)
    inputs = {spec.name: np.ones(spec.shape, spec.dtype) for spec in module.inputs}
    outputs = module.run(inputs)
    changed = {name: np.nextafter(array, np.float32(9)) for name, array in outputs.items()}
    repeats = repeat_runs(module, [Observation({}, changed, inputs)], 2)
    assert set(repeats.differing) == set(outputs)
    assert not repeats.passed
    report = replace(seen, repeats=repeats)
    assert not report.passed
    with pytest.raises(ValidationFailedError, match="gave other bits when it was run again"):
        report.raise_if_failed()
    assert replace(repeats, promised=False).passed


def test_atomics_and_libraries_make_no_promise(compiled: CompiledModule, llvm_target: ResolvedTarget) -> None:
    atomic = with_instruction("atomicAdd")
    assert uses_atomics(atomic)
    entry = describe_determinism({"sum": atomic}, (), llvm_target)
    assert not entry.bitwise
    assert "atomic operations in sum" in entry.rests_on[0]
    library = replace(compiled.choices[0], route=Route.LIBRARY)
    entry = describe_determinism({library.function: plain()}, (library,), llvm_target)
    assert not entry.bitwise
    assert "library's kernels" in entry.rests_on[0]


@pytest.mark.parametrize(
    ("text", "atomic"),
    [
        ("atomicAdd", True),
        ("red.global.add.f32 [%0], %1;", True),
        ("atom.shared.add.u32 %0, [%1], 1;", True),
        ("cp.reduce.async.bulk", True),
        ("redux.sync.add.s32", False),
        ("wgmma.mma_async.sync", False),
        ("prefetch", False),
    ],
)
def test_instructions_that_are_atomic(text: str, atomic: bool) -> None:
    assert uses_atomics(with_instruction(text)) is atomic


def test_differing_bits_tell_zeros_apart_and_equal_nans_are_equal() -> None:
    a = np.asarray([0.0, np.nan, 1.0], np.float32)
    assert differing_bits(a, a.copy()) == 0
    assert differing_bits(a, np.asarray([-0.0, np.nan, 1.0], np.float32)) == 1
    assert differing_bits(np.zeros((0, 2)), np.zeros((0, 2))) == 0
