from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.whole_models import tune_gpu_cases

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_case_that_fails_is_told_and_the_others_go_on(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ("bert-base-1x128", "gpt2-small-1x128")
    options = ["--cases", ",".join(cases), "--compile-only", "--target", "cuda:sm_90a", "--artifacts", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tune_gpu_cases", *options, "--jobs", jobs])
    # For the processes of the cases.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        tune_gpu_cases.main()
    assert ended.value.code == 1
    told = sorted(line for line in capsys.readouterr().out.splitlines() if ": failed: There is no database" in line)
    assert [line.partition(":")[0] for line in told] == list(cases)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--jobs", "0"), "--jobs 0: expected at least 1"),
        (("--rerank", "-1"), "--rerank -1: expected at least 0"),
        (("--rerank", "6", "--compile-only"), "--rerank measures and compiles: expected neither"),
        (("--rerank", "6", "--tune-only"), "--rerank measures and compiles: expected neither"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(
    options: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune_gpu_cases", *options])
    with pytest.raises(SystemExit) as ended:
        tune_gpu_cases.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
