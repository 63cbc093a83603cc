"""What `report --profile` calls kernels with: what the tuner times them with, from the manifest alone."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from tvm import tirx

from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.artifact.entries import ArgumentEntry, WorkEntry
from relaxtune.pipeline.artifact.export import build_manifest
from relaxtune.pipeline.artifact.kernel_choice import kernel_work
from relaxtune.pipeline.artifact.manifest import Manifest, parse_manifest
from relaxtune.pipeline.report.profile import profile_arrays
from relaxtune.schedules.functions.plain_attention import attention_function
from tests.schedules.attention_cases import PLAIN
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import NormCase, sums_of

NORM = NormCase(MatmulCase((2, 24), 64, 256, transposed=True), operand=True, shifted=True)


def work_of(func: tirx.PrimFunc) -> WorkEntry:
    work = kernel_work(func)
    assert work is not None
    return work


def attention(kind: str, dtype: str) -> tirx.PrimFunc:
    return attention_function(*dataclasses.replace(PLAIN, bias=(kind, dtype, (1, 1, 1, 8))).made())


@pytest.fixture
def manifest(compiled: CompiledModule) -> Manifest:
    made = build_manifest(compiled, 0.0)
    works = [work_of(attention("add", "float32")), work_of(NORM.func())]
    kernels = [dataclasses.replace(one, work=work) for one, work in zip(made.kernels, works, strict=False)]
    return dataclasses.replace(made, kernels=tuple(kernels))


@pytest.mark.parametrize(("kind", "dtype", "number"), [("add", "float32", 0), ("keep", "bool", 1)])
def test_masks_of_padding_hide_nothing(kind: str, dtype: str, number: int) -> None:
    arguments = work_of(attention(kind, dtype)).arguments
    assert [one.hides_nothing for one in arguments].count(None) == len(arguments) - 1
    arrays = profile_arrays(arguments)
    assert (arrays[3] == number).all()
    assert np.ptp(arrays[0].astype(np.float32)) > 0


def test_sums_are_those_of_their_rows_and_columns() -> None:
    func = NORM.func()
    names = [str(param.name) for param in func.params]
    arrays = dict(zip(names, profile_arrays(work_of(func).arguments), strict=True))
    np.testing.assert_allclose(arrays["partials"], sums_of(arrays["A"], NORM.group), rtol=1e-5)
    np.testing.assert_allclose(arrays["column_sums"], arrays["B"].astype(np.float64).sum(1), rtol=1e-4)


def test_what_arguments_are_made_of_survives_the_manifests_json(manifest: Manifest) -> None:
    read = parse_manifest(manifest.to_json(), "here")
    assert read == manifest
    arguments = [one for kernel in read.kernels if kernel.work for one in kernel.work.arguments]
    assert {one.hides_nothing for one in arguments} == {None, 0}
    assert {one.partial_sums_of for one in arguments} == {None, 0}
    assert {one.column_sums_of for one in arguments} == {None, (1, 1)}


def test_manifests_of_versions_before_have_random_arguments(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(manifest.to_json())
    for kernel in data["kernels"]:
        kernel["work"]["arguments"] = [
            {name: one[name] for name in ("dtype", "shape", "limit")} for one in kernel["work"]["arguments"]
        ]
    monkeypatch.setattr("relaxtune.pipeline.artifact.manifest._digest", lambda _: data["manifest_sha256"])
    read = parse_manifest(json.dumps(data), "here")
    (masked, _) = read.kernels
    assert masked.work is not None
    mask = masked.work.arguments[3]
    assert mask == ArgumentEntry("float32", mask.shape)
    assert np.ptp(profile_arrays(masked.work.arguments)[3]) > 0
