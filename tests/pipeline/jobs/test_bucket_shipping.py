"""A shape bucket ships with tuned kernels only where it is faster with them: real kernels, one made slow on purpose."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from relaxtune.pipeline.choose import shipping as shipping_module
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.experiment.experiment import LEAST_GAIN, Question
from relaxtune.pipeline.jobs.compile_and_tune import compile_model, finish_tuned
from relaxtune.pipeline.jobs.tuned_model import TunedModel, bucket_kernels, choose_kernels
from relaxtune.pipeline.jobs.values import TuneRequest
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tuning.options import TuningSummary
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.artifact.test_compile import keep, matmul, parallel_trace, record_of

NODES = """
    <ir_version: 10, opset_import: ["" : 20]>
    rows (float[n,256] a, float[256,256] b) => (float[n,256] y) { c = MatMul(a, b)  y = Softmax(c) }
"""


@pytest.mark.slow
def test_each_bucket_ships_with_what_is_faster_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping_module, "_QUESTION", Question(-LEAST_GAIN, 0.02, seconds=0.5))
    model = tmp_path / "rows.onnx"
    onnx.save(onnx.parser.parse_model(NODES), model)
    prepared = prepare_model(ModelRequest(model, target="llvm", buckets={"n": (8, 128)}))
    small, large = (prepared.of_bucket(bucket) for bucket in prepared.buckets)
    with TuningDatabase.open("sqlite://") as database:
        task = matmul(list(large.tasks))
        slow = record_of(task, prepared.target, decision=parallel_trace(task), latencies_us=(1.0,))
        number = keep(database, task, slow)
        job = database.start_job(model="rows", model_sha256="0" * 64, target=target_key(prepared.target))
        found = TunedModel(
            job.id, TuningSummary((), 0.0, {}, interrupted=False), prepared, choose_kernels(prepared, database)
        )
        assert number in [choice.record_id for choice in bucket_kernels(large, database)]
        made = finish_tuned(prepared, found, TuneRequest("unused.db", samples=1), database, tmp_path / "artifact")
        # The small bucket has no record: both of its forms are the same.
        assert list(made.bucket_shipping) == ["n=128"]
        assert not made.bucket_shipping["n=128"].tuned
        assert "Ships untuned" in made.bucket_shipping["n=128"].verdict
        assert made.compiled.manifest.buckets is not None
        kernels = [kernel for entry in made.compiled.manifest.buckets.entries for kernel in entry.kernels]
        assert number not in [kernel.record_id for kernel in kernels]
        assert made.compiled.validation is not None
        assert made.compiled.validation.passed
        # Compiling from records does the same from here on.
        assert all(choice.record_id is None for choice in bucket_kernels(large, database))
        assert all(choice.record_id is None for choice in bucket_kernels(small, database))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "rows.onnx"]


@pytest.mark.slow
def test_buckets_share_one_packing_of_each_weight(tmp_path: Path) -> None:
    sizes = {}
    for name, buckets in (("symbolic", {}), ("bucketed", {"sequence": (64, 128)})):
        shapes = {"input_ids": ("batch", "sequence")}
        result = compile_model(
            ModelRequest("bert-tiny", shapes, target="llvm", buckets=buckets), tmp_path / name, samples=0
        )
        assert result.manifest.memory is not None
        sizes[name] = result.manifest.memory.weights_bytes
        assert result.manifest.memory.weights_dtypes[0] == "float32"
        assert result.manifest.memory.model_bytes == pytest.approx(sizes["symbolic"], rel=0.15)
    # A table of positions, cut to the size of a bucket, is one more.
    assert sizes["bucketed"] < 1.2 * sizes["symbolic"]
