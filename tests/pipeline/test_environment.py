from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import tvm
import tvm_ffi

import relaxtune
from relaxtune.pipeline import environment as environment_module
from relaxtune.pipeline.environment import code_version, cpu_name, detect_environment, nvidia_driver_version, target_key
from relaxtune.schedules.targets import ResolvedTarget, resolve_target


def test_cpu_environment_names_the_processor_and_its_cores(llvm_target: ResolvedTarget) -> None:
    found = detect_environment(llvm_target)
    assert (found.device_kind, found.arch) == ("cpu", llvm_target.arch)
    assert found.device_name == cpu_name()
    assert found.cores == llvm_target.limits.cores  # type: ignore[union-attr]
    assert (found.tvm_version, found.tvm_ffi_version) == (tvm.__version__, tvm_ffi.__version__)
    assert (found.driver, found.cuda) == (None, None)


def test_environment_of_another_processor_has_no_device() -> None:
    found = detect_environment(resolve_target('{"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 8}'))
    assert (found.device_name, found.arch, found.cores) == ("unknown", "skylake-avx512", 8)


@pytest.mark.skipif(tvm.cuda(0).exist, reason="needs a machine without a GPU")
def test_environment_without_a_gpu_is_for_compiling_only() -> None:
    found = detect_environment(resolve_target("cuda:sm_90a"))
    assert (found.device_kind, found.device_name, found.arch) == ("cuda", "unknown", "sm_90a")
    assert (found.driver, found.cuda, found.cores) == (None, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")
def test_environment_of_the_gpu_is_complete() -> None:
    found = detect_environment(resolve_target("cuda"))
    assert found.device_name == tvm.cuda(0).device_name
    assert found.cuda is not None
    assert found.cuda.count(".") == 1


def test_environment_of_a_gpu_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        exist = True
        compute_version = "9.0"
        device_name = "NVIDIA H200"
        api_version = 13000

    target = resolve_target("cuda:sm_90a")
    monkeypatch.setattr(tvm, "cuda", lambda _: Device)
    monkeypatch.setattr(environment_module, "nvidia_driver_version", lambda: "580.65.06")
    found = detect_environment(target)
    assert (found.device_name, found.driver, found.cuda) == ("NVIDIA H200", "580.65.06", "13.0")


def test_target_key_holds_every_attribute_that_shapes_code(llvm_target: ResolvedTarget) -> None:
    key = target_key(llvm_target)
    assert (key.kind, key.arch) == ("llvm", llvm_target.arch)
    attributes = json.loads(key.attributes)
    assert attributes["mcpu"] == llvm_target.arch
    assert not {"host", "tag", "keys", "kind"} & set(attributes)
    wide = target_key(resolve_target('{"kind": "llvm", "mcpu": "znver4", "mattr": ["-avx512f"]}'))
    assert json.loads(wide.attributes)["mattr"] == ["-avx512f"]
    assert target_key(llvm_target) == key


def test_names_come_from_the_system_where_it_tells(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU 9000\n")
    assert cpu_name(tmp_path / "cpuinfo") == "Some CPU 9000"
    assert cpu_name(tmp_path / "missing")
    (tmp_path / "version").write_text("580.65.06\n")
    assert nvidia_driver_version(tmp_path / "version") == "580.65.06"
    assert nvidia_driver_version(tmp_path / "missing") is None


def test_attributes_become_plain_json() -> None:
    nested = {"a": [1, "b", None, 2.5, True]}
    assert json.loads(json.dumps(environment_module._plain(nested)))["a"] == [1, "b", None, 2.5, True]
    assert environment_module._plain(object()).startswith("<object")  # type: ignore[attr-defined]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=ann", "-c", "user.email=ann@host"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_code_version_names_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert code_version(tmp_path / "installed") == relaxtune.__version__
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    git(checkout, "init")
    (checkout / "code.py").write_text("1")
    git(checkout, "add", "code.py")
    git(checkout, "commit", "-m", "first")
    git(checkout, "tag", "v9")
    (checkout / "notes").write_text("not tracked")
    expected = f"{relaxtune.__version__}+g{git(checkout, 'rev-parse', '--short=12', 'HEAD')}"
    assert code_version(checkout) == expected
    (checkout / "code.py").write_text("2")
    assert code_version(checkout / "../checkout") == f"{expected}.dirty"


def test_code_version_is_the_version_alone_where_git_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert code_version(tmp_path) == relaxtune.__version__
