"""Artifacts inside the stock ONNX Runtime: the bits of the bare artifact, and messages with a remedy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from relaxtune.pipeline.artifact import provider
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.artifact.provider import PROVIDER, ProviderExport, export_for_onnx_runtime
from relaxtune.pipeline.errors import ArtifactError, PipelineError
from tests.pipeline.artifact.call_cases import ARTIFACTS, CASES, without_quotes

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="session")
def exported(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> ProviderExport:
    """Return bert-tiny for ONNX Runtime, with the provider registered in this process."""
    written = export_for_onnx_runtime(artifact, tmp_path_factory.mktemp("onnxruntime"))
    ort.register_execution_provider_library(PROVIDER, str(written.library))
    return written


def session(model: Path | bytes, options: dict[str, str] | None = None) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    settings.add_provider_for_devices(devices, options or {})
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), settings)


def run(opened: ort.InferenceSession, inputs: Arrays) -> Arrays:
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(names, inputs), strict=True))


def assert_bits(got: Arrays, expected: Arrays) -> None:
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert got[name].tobytes() == array.tobytes(), name


def test_the_model_has_the_inputs_and_outputs_of_the_artifact(exported: ProviderExport, artifact: Path) -> None:
    onnx.checker.check_model(onnx.load(exported.model))
    opened, manifest = session(exported.model), load_manifest(artifact)
    assert opened.get_providers()[0] == PROVIDER
    for values, specs in ((opened.get_inputs(), manifest.inputs), (opened.get_outputs(), manifest.outputs)):
        assert [(value.name, tuple(value.shape)) for value in values] == [(spec.name, spec.shape) for spec in specs]


def test_the_printed_lines_run_without_relaxtune_in_the_process(
    exported: ProviderExport, artifact: Path, bert_inputs: Arrays, tmp_path: Path
) -> None:
    np.savez(tmp_path / "in.npz", **bert_inputs)
    rest = "import sys, numpy as np\nnp.savez('out.npz', *session.run(None, dict(np.load('in.npz'))))\n"
    rest += "assert not {'tvm', 'relaxtune'} & sys.modules.keys()\n"
    # TVM's library is one file for both: another order of loading than in this process.
    rest += f"import relaxtune\nrelaxtune.load({str(artifact)!r}).run(dict(np.load('in.npz')))\n"
    done = subprocess.run(
        [sys.executable, "-c", exported.python + rest], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(exported.python.splitlines()) == 5
    with np.load(tmp_path / "out.npz") as made:
        expected = Module.load(artifact).run(bert_inputs)
        assert_bits(dict(zip(expected, made.values(), strict=True)), expected)


@pytest.mark.parametrize("name", ARTIFACTS)
def test_onnx_runtime_keeps_the_table_of_calls(exported: ProviderExport, name: str, tmp_path: Path) -> None:
    artifact = ARTIFACTS[name](tmp_path)
    opened, module = session(export_for_onnx_runtime(artifact, tmp_path / "out").model), Module.load(artifact)
    for case in (case for case in CASES if case.artifact == name):
        if case.route:
            assert_bits(run(opened, case.inputs), module.run(case.inputs))
            continue
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT|INVALID_GRAPH") as refused:
            run(opened, case.inputs)
        # ONNX Runtime checks dtypes itself, in its own words.
        said = "Unexpected input data type" if "dtype" in case.said else without_quotes(case.said)
        assert re.search(said, without_quotes(str(refused.value)))


def test_sessions_and_threads_run_at_once(exported: ProviderExport, artifact: Path, bert_inputs: Arrays) -> None:
    expected = Module.load(artifact).run(bert_inputs)
    sessions = [session(exported.model, {"threads": "2"}), session(exported.model)]
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda number: run(sessions[number % 2], bert_inputs), range(16)):
            assert_bits(got, expected)


def test_outputs_that_are_not_wanted_are_left_out(
    exported: ProviderExport, artifact: Path, bert_inputs: Arrays
) -> None:
    (name,) = [spec.name for spec in load_manifest(artifact).outputs][1:]
    (got,) = session(exported.model).run([name], bert_inputs)
    assert_bits({name: got}, {name: Module.load(artifact).run(bert_inputs)[name]})


def _without_artifact(folder: Path, _: onnx.ModelProto) -> None:
    shutil.rmtree(folder / "artifact")


def _changed_weights(folder: Path, _: onnx.ModelProto) -> None:
    file = folder / "artifact/params.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def _elsewhere(_: Path, model: onnx.ModelProto) -> None:
    next(one for one in model.graph.node[0].attribute if one.name == "ep_cache_context").s = b"../artifact"


def _fewer_inputs(_: Path, model: onnx.ModelProto) -> None:
    del model.graph.node[0].input[-1]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            _without_artifact,
            "artifact: the model's artifact is missing; copy the model's folder whole, or write",
        ),
        (_changed_weights, "params.safetensors: it was changed after it was written.*; copy the artifact again"),
        (_elsewhere, "'../artifact' is not inside the model's folder; write the model again with `relaxtune artifact"),
        (
            _fewer_inputs,
            "the model has 2 inputs of it, it has 3; write the model again with `relaxtune",
        ),
    ],
)
def test_a_damaged_export_is_refused_when_the_session_opens(
    exported: ProviderExport, tmp_path: Path, damage: Callable[[Path, onnx.ModelProto], None], said: str
) -> None:
    copy = Path(shutil.copytree(exported.model.parent, tmp_path / "copy"))
    model = onnx.load(copy / exported.model.name)
    damage(copy, model)
    onnx.save(model, copy / exported.model.name)
    with pytest.raises(Exception, match=said):
        session(copy / exported.model.name)


def test_a_model_without_a_file_or_with_other_dtypes_is_refused(
    exported: ProviderExport, bert_inputs: Arrays, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"was not loaded from a file.*; give InferenceSession the path"):
        session(exported.model.read_bytes())
    copy = Path(shutil.copytree(exported.model.parent, tmp_path / "copy")) / exported.model.name
    model = onnx.load(copy)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    onnx.save(model, copy)
    with pytest.raises(
        Exception, match=r"output .*: the model has another dtype than the artifact; write the model again"
    ):
        run(session(copy), bert_inputs)


@pytest.mark.parametrize("value", ["many", "-1", "2x"])
def test_an_option_that_is_no_number_is_refused(exported: ProviderExport, value: str) -> None:
    with pytest.raises(Exception, match=f"option threads is '{value}'; give a number of 0 or more"):
        session(exported.model, {"threads": value})


def test_artifacts_that_the_provider_cannot_run_are_not_exported(
    artifact_copy: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = artifact_copy()
    manifest = load_manifest(copy)
    library = replace(manifest, target=replace(manifest.target, libraries=("libcublasLt.so.13",)))
    (copy / MANIFEST_FILE).write_text(library.to_json())
    with pytest.raises(ArtifactError, match=r"calls .*; compile it without --routes library"):
        export_for_onnx_runtime(copy, tmp_path / "out")
    (copy / MANIFEST_FILE).write_text(manifest.to_json())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(PipelineError, match="cmake is missing; install cmake and g"):
        export_for_onnx_runtime(copy, tmp_path / "out")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setattr(provider, "_provider", lambda: tmp_path / "none")
    with pytest.raises(PipelineError, match=r"cannot be written.*name another folder"):
        export_for_onnx_runtime(copy, tmp_path / "file")
