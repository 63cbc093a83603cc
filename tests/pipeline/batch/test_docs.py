"""What docs/batch.md says of clusters: its YAML is one that Ray takes, its Slurm scripts start what they should."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

TEXT = (Path(__file__).parents[3] / "docs" / "batch.md").read_text(encoding="utf-8")
# Each says what it was called with. What blocks in a job lives until the test has read that.
STUB = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'
SRUN = STUB + 'while [[ $1 == --* || $1 == -w ]]; do [[ $1 == -w ]] && shift; shift; done\nexec "$@"\n'
SCONTROL = 'printf "node1\\nnode2\\nnode3\\nnode4\\n"\n'


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_ray_takes_the_yaml_of_the_docs() -> None:
    whole, marked = blocks("yaml")
    config = yaml.safe_load(whole)
    other = {**config, "worker_start_ray_commands": [config["worker_start_ray_commands"][0], *yaml.safe_load(marked)]}
    for one in (config, other):
        validate_config(prepare_config(copy.deepcopy(one)))
    with pytest.raises(Exception, match="worker_start_commands"):
        validate_config(prepare_config({**copy.deepcopy(config), "worker_start_commands": []}))


@pytest.mark.parametrize("nodes", [1, 4])
def test_slurm_scripts_start_what_they_should(nodes: int, tmp_path: Path) -> None:
    (script,) = [one for one in blocks("bash") if f"#SBATCH --nodes={nodes} " in one]
    for name, text in {"srun": SRUN, "ray": STUB, "relaxtune": STUB, "sleep": STUB, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls.txt"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls)}
    done = subprocess.run(
        ["bash", "-eu", "-c", f"{script}\nwait"],
        env={**environment, "SLURM_JOB_NODELIST": "node[1-4]"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    called = [shlex.split(line) for line in calls.read_text(encoding="utf-8").splitlines()]
    assert {name for name, *_ in called} <= {"srun", "ray", "relaxtune", "sleep"}
    (run,) = [words for words in called if words[0] == "relaxtune"]
    assert run[:4] == ["relaxtune", "batch", "run", "night.toml"]
    started = [words[2:] for words in called if words[0] == "ray"]
    if nodes == 1:
        assert (started, run[4:]) == ([], [])
        return
    assert sorted(started) == [["--address=node1:6379", "--block"], ["--head", "--port=6379", "--block"]]
    assert run[4:] == ["--cluster", "node1:6379"]
    steps = [words for words in called if words[0] == "srun"]
    assert ["--nodes=3", "--ntasks=3", "--exclude=node1"] in [words[1:4] for words in steps]
    # A step beside the head's needs --overlap: Slurm gives a node's cores to one step alone.
    assert next(words for words in steps if "relaxtune" in words)[1] == "--overlap"
