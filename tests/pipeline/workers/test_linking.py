"""What compilers and linkers write for a while lies where the next run sweeps it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.support import cc

from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.bisect.plain_kernels import load_code
from relaxtune.pipeline.temporary import PREFIX
from relaxtune.pipeline.workers.linking import link_to_load, linker_in, run_compiler
from tests.unoptimised import UNOPTIMISED


def test_linker_of_an_export_writes_its_files_into_a_folder_that_is_swept(
    compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []
    run = subprocess.Popen

    def noted(command, *args, **kwargs):
        given.append(Path((kwargs.get("env") or {})["TMPDIR"]))
        return run(command, *args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", noted)
    write_artifact(compiled, tmp_path / "artifact")
    assert given
    assert all(place.name.startswith(PREFIX) for place in given)


def test_text_is_compiled_and_its_compiler_knows_the_folder(tmp_path: Path) -> None:
    done = run_compiler(["sh", "-c", "cat; printf $TMPDIR"], tmp_path, text="given ")
    assert (done.returncode, done.stdout) == (0, f"given {tmp_path}")


def test_a_failed_link_says_what_the_linker_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with status 1: .*missing\.o"):
        linker_in(tmp_path)(str(tmp_path / "a.so"), [str(tmp_path / "missing.o")])


def test_a_failed_link_of_code_to_load_says_what_the_linker_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"ld ended with status 1: .*missing\.o"):
        link_to_load(str(tmp_path / "a.so"), [tmp_path / "missing.o"])


def test_code_to_load_is_linked_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's driver takes six times as long as the linker."""
    x = te.placeholder((4,), name="x")
    # A call of the mathematics library, and one of the functions that half precision is converted by.
    func = te.create_prim_func([x, te.compute((4,), lambda i: tirx.erf(x[i]).astype("float16"), name="y")])
    executable = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), UNOPTIMISED)
    monkeypatch.setattr(cc, "get_cc", lambda: None)
    given, got = np.array([-1, 0, 0.5, 2], "float32"), tvm.runtime.empty((4,), "float16")
    load_code(executable)["main"](tvm.runtime.tensor(given), got)
    np.testing.assert_allclose(got.numpy(), [-0.8427, 0, 0.5205, 0.9953], rtol=1e-3)
