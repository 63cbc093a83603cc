"""`--bucket` from end to end: compile, validate over every route, bench each bucket; and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.cli.app import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer over tokens, each of which is computed by itself."""
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype("float32")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="layer"), helper.make_node("Tanh", ["h"], ["y"])],
        "tokens",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", 16])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path_factory.mktemp("model") / "tokens.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def artifact(model: Path) -> Path:
    out = model.parent / "artifact"
    with pytest.raises(SystemExit) as ended:
        main(["compile", str(model), "--target", "llvm", "--bucket", "tokens=4,8", "--out", str(out)])
    assert not ended.value.code
    return out


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    seen = capsys.readouterr()
    return int(ended.value.code or 0), seen.out, seen.err


def test_compile_tells_the_buckets_and_the_padding(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.parent / "told"
    words = ["compile", str(model), "--target", "llvm", "--bucket", "tokens=4", "--out", str(out)]
    code, shown, _ = run(capsys, *words)
    assert code == 0
    assert "tokens=4" in shown
    assert "padded on the right" in " ".join(shown.split())


def test_validate_goes_by_every_route(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "validate", str(artifact), "--samples", "1", "--format", "json")
    assert code == 0
    # Two buckets and the symbolic code, each at its size and at a smaller one.
    assert json.loads(shown)["samples"] == 6


@pytest.mark.slow
def test_report_covers_the_code_of_each_bucket(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "report", str(artifact), "--no-profile", "--format", "json")
    assert code == 0
    told = json.loads(shown)
    assert (
        told["notes"][0]
        == "the table lists the kernels of symbolic sizes; the kernels of tokens=4, tokens=8 follow below"
    )
    assert [one["model"] for one in told["buckets"]] == ["tokens [tokens=4]", "tokens [tokens=8]"]
    assert all(one["kernels"] and one["kernels"][0]["onnx_nodes"] for one in told["buckets"])
    code, shown, _ = run(capsys, "report", str(artifact), "--format", "table")
    assert "tokens [tokens=8]" in " ".join(shown.split())
    page = artifact.parent / "report.html"
    assert run(capsys, "report", str(artifact), "--out", str(page))[0] == 0
    assert re.findall(r"<h1>([^<]*)</h1>", page.read_text()) == ["tokens", "tokens [tokens=4]", "tokens [tokens=8]"]


def test_bench_times_each_bucket_and_counts(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(
        capsys, "bench", str(artifact), "--runs", "2", "--warmup", "1", "--against", "", "--format", "json"
    )
    assert code == 0
    data = json.loads(shown)
    assert list(data["routes"]) == ["tokens=4", "tokens=8", "symbolic"]
    assert data["routes"]["tokens=4"]["conditions"]["shape"] == "tokens=4"
    counts = data["statistics"]
    # The check of the outputs, one untimed run, and two pairs of an untimed and a timed one.
    assert counts["slow_path"] == 6
    assert [one["exact"] for one in counts["buckets"]] == [6, 6]


def test_bench_shows_the_counts_in_a_table(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = run(capsys, "bench", str(artifact), "--runs", "1", "--warmup", "0", "--against", "")
    assert code == 0
    assert "calls by bucket" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--bucket", "tokens"), "AXIS=SIZE"),
        (("--bucket", "tokens=4", "--bucket", "tokens=8"), "twice"),
    ],
)
def test_a_bucket_that_cannot_be_read_is_a_usage_error(
    model: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, _, told = run(capsys, "compile", str(model), "--target", "llvm", *words)
    assert code == 2
    assert said in told


def test_a_bucket_of_an_axis_that_is_not_there_fails_and_names_those_that_are(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, told = run(capsys, "compile", str(model), "--target", "llvm", "--bucket", "sequence=4")
    assert code == 1
    assert "expected one of tokens" in " ".join(told.split())


def test_bench_draws_latency_over_the_lengths_of_a_file(
    model: Path, artifact: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    static = tmp_path / "static"
    assert run(capsys, "compile", str(model), "--target", "llvm", "--dim", "tokens=4", "--out", str(static))[0] == 0
    lengths, plot = tmp_path / "lengths.csv", tmp_path / "plot.svg"
    lengths.write_text("tokens,count\n4,30\n5,10\n", encoding="utf-8")
    words = ["bench", str(artifact), "--lengths", str(lengths), "--beside", str(static), "--runs", "2", "--warmup", "0"]
    code, shown, told = run(capsys, *words, "--plot", str(plot), "--format", "json")
    assert code == 0, told
    found = json.loads(shown)
    assert [(point["sizes"], point["count"]) for point in found["points"]] == [({"tokens": 4}, 30), ({"tokens": 5}, 10)]
    arms = [[arm["name"] for arm in point["report"]["arms"]] for point in found["points"]]
    assert arms == [["artifact", "static", "ort"], ["artifact", "ort"]]
    assert found["mean_ms"]["static"] is None
    medians = [point["report"]["arms"][0]["median_ms"] for point in found["points"]]
    assert found["mean_ms"]["artifact"] == pytest.approx(0.75 * medians[0] + 0.25 * medians[1])
    drawn = ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    assert {"artifact", "static", "ort", "tokens"} <= {
        text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")
    }
    code, shown, _ = run(capsys, *words)
    assert code == 0
    assert "mean over calls" in shown
    sweep = ["--batch-sweep", "2,1", "--against", "", "--runs", "1", "--warmup", "0", "--plot", str(plot)]
    code, shown, told = run(capsys, "bench", str(artifact), *sweep)
    assert code == 0, told
    assert re.search(r"tokens=1.*tokens=2", shown, re.DOTALL)
    assert "artifact, rows/s" in " ".join(shown.split())
    drawn = ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    assert {"ms", "rows/s"} <= {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch-sweep", "1,two"), "--batch-sweep '1,two': expected sizes such as 1,2,4,8"),
        (("--batch-sweep", "1", "--lengths", "x.csv"), "give one of them"),
        (("--batch-sweep", "1", "--db", "x.db"), "not noted in a database"),
        (("--dim", "tokens"), "--dim: 'tokens' cannot be read: expected AXIS=SIZE, such as sequence=128"),
        (("--dim", "tokens=1,tokens=2"), "names axis 'tokens' twice"),
        (("--torch", "module", "--against", "torch"), "expected MODULE:FACTORY or FILE.py:FACTORY"),
        (("--against", "ort-cuda"), "ort-cuda does not compute on the artifact's device (target llvm)"),
    ],
)
def test_what_bench_cannot_do_is_a_usage_error(
    artifact: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, _, told = run(capsys, "bench", str(artifact), *words)
    assert (code, said in " ".join(told.split())) == (2, True)


def test_an_axis_named_twice_is_a_usage_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = run(capsys, "compile", str(model), "--target", "llvm", "--shape", "x=4x16", "--dim", "x=4")
    assert (code, "--shape and --dim both name 'x'" in told) == (2, True)


def test_bench_refuses_lengths_of_other_axes_and_a_plot_of_none(
    artifact: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("words,count\n4,30\n", encoding="utf-8")
    code, _, told = run(capsys, "bench", str(artifact), "--lengths", str(lengths))
    assert (code, "axis 'words' of the lengths" in told) == (1, True)
    code, _, told = run(capsys, "bench", str(artifact), "--plot", str(tmp_path / "plot.svg"))
    assert (code, "go with --lengths FILE" in " ".join(told.split())) == (2, True)
