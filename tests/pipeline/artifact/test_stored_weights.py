"""Weights of each dtype come back from the file as they were written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from relaxtune.pipeline.artifact.export import write_weights
from relaxtune.pipeline.artifact.loading import read_weights
from relaxtune.pipeline.artifact.manifest import MODULE_FILE
from relaxtune.pipeline.tvm_runtime.library import array_of, cpu, tensor_of


@dataclass
class _Names:
    """The part of a manifest that says which weights there are."""

    weights: tuple[str, ...]
    buckets: None = None


def test_weights_of_each_dtype_come_back(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).standard_normal((3, 5))
    dtypes = ["float32", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "int8", "int64"]
    weights = {f"w{number}": drawn.astype(dtype) for number, dtype in enumerate(dtypes)}
    weights["scalar"] = np.array(2.5, "float32")
    (tmp_path / MODULE_FILE).touch()
    write_weights(weights, tmp_path / "weights")
    found = dict(read_weights(tmp_path / "weights", _Names(tuple(weights))))  # type: ignore[arg-type]
    for name, weight in weights.items():
        assert found[name].dtype == weight.dtype
        assert found[name].tobytes() == weight.tobytes()
        assert array_of(tensor_of(found[name], cpu())).tobytes() == weight.tobytes()
