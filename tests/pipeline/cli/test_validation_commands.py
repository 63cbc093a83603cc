"""`relaxtune validate --bisect` and `relaxtune compare` as a user runs them."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.passes import lowering_steps
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from tests.pipeline.faults.planting import FaultyKernel, build
from tests.pipeline.faults.small_models import make_model
from tests.pipeline.faults.test_kernels import CASES as KERNEL_CASES
from tests.pipeline.faults.test_passes import CASES as PASS_CASES


@dataclass(frozen=True)
class Builds:
    """One model compiled rightly, and with a kernel that is not."""

    model: OnnxModel
    right: Path
    wrong: Path


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    folder = tmp_path_factory.mktemp("builds")
    target: ResolvedTarget = resolve_target("llvm")
    model = make_model("windowed", folder)
    for name, faults in (("right", []), ("wrong", [KERNEL_CASES["a mask is read one key early"].fault])):
        build(model, target, folder / name, *faults)
    return Builds(model, folder / "right" / "artifact", folder / "wrong" / "artifact")


def test_validate_finds_the_kernel_and_writes_a_reproduction(relaxtune, builds, tmp_path) -> None:
    options = ["--bisect", "--repro", tmp_path / "repro", "--samples", 1, "--format", "json"]
    outcome = relaxtune("validate", builds.wrong, *options)
    assert outcome.code == 3
    found = outcome.data["bisection"]
    assert found["culprit"] == "kernel"
    assert "/Where" in found["kernel"]["onnx_nodes"]
    assert Path(found["reproduction"]) == tmp_path / "repro" / "reproduce.py"
    assert "all kernels replaced by their unscheduled form: results are right" in outcome.stderr
    assert json.loads((builds.wrong / "manifest.json").read_text())["validation"]["bisection"] == found


def test_validate_finds_the_pass_and_prints_it(relaxtune, builds, tmp_path, monkeypatch) -> None:
    PASS_CASES["the window is one too wide"].fault.plant(monkeypatch)
    build(builds.model, resolve_target("llvm"), tmp_path)
    outcome = relaxtune("validate", tmp_path / "artifact", "--bisect", "--samples", 1)
    assert outcome.code == 3
    assert "bisection of windowed: pass" in outcome.stdout
    assert "ONNX node '/Where'" in outcome.stdout
    assert "pass 'fold_constants' (right without it)" in outcome.stdout
    assert (tmp_path / "artifact-repro" / "reproduce.py").is_file()


def test_nothing_is_bisected_when_the_validation_passes(relaxtune, builds) -> None:
    outcome = relaxtune("validate", builds.right, "--bisect", "--repeat", 3, "--format", "json")
    assert outcome.code == 0
    assert outcome.data["bisection"] is None
    assert outcome.data["repeats"]["runs"] == 3
    assert not builds.right.with_name("artifact-repro").exists()


def test_compare_runs_two_artifacts_and_shows_the_kernels_that_differ(relaxtune, builds) -> None:
    outcome = relaxtune("compare", builds.right, builds.wrong, "--format", "json")
    assert outcome.code == 0
    (drift,) = outcome.data["outputs"]
    assert drift["name"] == "y"
    assert drift["max_abs"] > 0.01
    assert {one["field"] for one in outcome.data["kernels"]} == {"kernel_hash"}
    assert outcome.data["builds"] == []
    table = relaxtune("compare", builds.right, builds.right)
    assert table.code == 0
    assert "100.00%" in table.stdout
    assert "kernels that differ" not in table.stdout


def test_compare_exits_3_only_where_something_is_asked_for(relaxtune, builds) -> None:
    assert relaxtune("compare", builds.right, builds.wrong, "--exact").code == 3
    failed = relaxtune("compare", builds.right, builds.wrong, "--atol", 1e-3)
    assert failed.code == 3
    assert "differ by more than rtol 0 and atol 0.001" in failed.stderr
    assert relaxtune("compare", builds.right, builds.wrong, "--atol", 100).code == 0
    assert relaxtune("compare", builds.right, builds.right, "--exact").code == 0


def test_outputs_saved_on_another_machine_are_compared(relaxtune, builds, tmp_path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 12, 16)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    saved = {}
    for name, artifact in (("right", builds.right), ("wrong", builds.wrong)):
        saved[name] = tmp_path / f"{name}.npz"
        assert relaxtune("run", artifact, "--inputs", tmp_path / "x.npz", "--outputs", saved[name]).code == 0
    both = relaxtune("compare", saved["right"], saved["wrong"], "--format", "json")
    assert both.code == 0
    assert both.data["kernels"] == []
    one = relaxtune("compare", builds.right, saved["right"], "--inputs", tmp_path / "x.npz", "--exact")
    assert one.code == 0
    expected = Module.load(builds.right).run({"x": x})["y"]
    assert both.data["outputs"][0]["max_abs"] == pytest.approx(
        float(np.abs(expected - Module.load(builds.wrong).run({"x": x})["y"]).max()), rel=1e-6
    )


def test_compare_says_what_it_lacks(relaxtune, builds, tmp_path) -> None:
    np.savez(tmp_path / "y.npz", y=np.zeros((2, 12, 16), np.float32))
    outcome = relaxtune("compare", builds.right, tmp_path / "y.npz")
    assert outcome.code == 2
    assert "their inputs are not given" in outcome.stderr
    outcome = relaxtune("compare", builds.right, tmp_path / "missing.npz", "--inputs", tmp_path / "y.npz")
    assert outcome.code == 2
    assert "missing.npz cannot be read" in outcome.stderr
    (tmp_path / "bad.npz").write_text("no archive")
    outcome = relaxtune("compare", tmp_path / "bad.npz", tmp_path / "y.npz")
    assert outcome.code == 2
    assert "expected an artifact, or a .npz file of outputs" in outcome.stderr


def test_a_bisection_that_is_not_possible_leaves_the_verdict(relaxtune, builds, monkeypatch) -> None:
    # The artifact was compiled with a pass that the list of passes now has no more: other kernels are made.
    steps = tuple(step for step in lowering_steps() if step.name != "fuse_operations")
    monkeypatch.setattr(importlib.import_module("relaxtune.pipeline.passes.lower"), "lowering_steps", lambda: steps)
    outcome = relaxtune("validate", builds.wrong, "--bisect", "--samples", 1, "--format", "json")
    assert outcome.code == 3
    assert outcome.data["bisection"] is None
    assert "not bisected: " in outcome.stderr
    assert "is not what this version makes of the model" in outcome.stderr


@pytest.mark.slow
def test_a_kernel_that_hides_in_the_tolerance_is_found_when_kernels_are_compared(relaxtune, tmp_path) -> None:
    model = make_model("bert", tmp_path)
    slightly = FaultyKernel("encoder_layer_0_intermediate_Mul_1", [("0.70710678118654757", "0.7070")])
    build(model, resolve_target("llvm"), tmp_path, slightly)
    assert relaxtune("validate", tmp_path / "artifact", "--samples", 1).code == 0
    outcome = relaxtune("validate", tmp_path / "artifact", "--samples", 1, "--kernels", "--format", "json")
    assert outcome.code == 3
    (kernel,) = outcome.data["faulty_kernels"]
    assert "/encoder/layer.0/intermediate/Mul_1" in kernel["onnx_nodes"]
    assert "its outputs are within tolerance, and 1 kernels are not" in outcome.stderr


def test_right_kernels_are_not_told(relaxtune, builds) -> None:
    outcome = relaxtune("validate", builds.right, "--samples", 1, "--kernels")
    assert outcome.code == 0
    assert "0 faulty kernels" in outcome.stdout
