"""What a user installs: the locked sets, and the package by every way of installing it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import relaxtune

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOMS = ("models", "pipeline", "schedules", "tuning_db")


def read_lock(name: str, python: str) -> dict[str, str]:
    """Return the versions of a lock for a Python on Linux, by canonical name."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    versions = {}
    for entry in re.sub(r"#.*\n", "", text).replace(" \\\n", " ").splitlines():
        pinned, *hashes = entry.split("--hash=sha256:")
        assert hashes, f"{pinned} has no hash"
        requirement = Requirement(pinned.strip())
        environment = {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": "linux",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        if requirement.marker is None or requirement.marker.evaluate(environment):
            versions[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return versions


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_lock_holds_a_version_of_every_requirement(name: str, python: str) -> None:
    locked = read_lock(name, python)
    wanted = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    if name == "dev":
        extras = PROJECT["project"]["optional-dependencies"]
        wanted += [*extras["dev"], *extras["cuda"]]
        runtime = read_lock("runtime", python)
        assert runtime.items() <= locked.items()
    for requirement in map(Requirement, wanted):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}; run `make lock`"


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_lock_is_whole_since_nothing_is_solved_when_it_is_installed(name: str) -> None:
    locked = read_lock(name, "3.11" if sys.version_info < (3, 12) else "3.12")
    extras = PROJECT["project"]["optional-dependencies"]
    waiting = [*PROJECT["project"]["dependencies"], *(extras["dev"] + extras["cuda"] if name == "dev" else [])]
    seen = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        for extra in requirement.extras or {""}:
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            assert canonicalize_name(requirement.name) in locked, f"{requirement} is not locked; run `make lock`"
            wanted = [Requirement(text) for text in metadata.requires(requirement.name) or []]
            waiting += [str(w) for w in wanted if w.marker is None or w.marker.evaluate({"extra": extra})]
    assert len(seen) > len(PROJECT["project"]["dependencies"])


def test_locked_sets_are_installed_without_solving() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"pip install (.*) -r requirements/\w+\.txt", makefile)
    assert commands == ["--quiet --require-hashes --no-deps"] * 2


@pytest.mark.parametrize("name", ["runtime", "dev"])
def test_lock_names_no_registry(name: str) -> None:
    assert "://" not in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")


def test_newest_of_everything_has_no_upper_bounds_and_keeps_pins() -> None:
    script = ROOT / "requirements" / "newest.py"
    lines = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.splitlines()
    found = {requirement.name: str(requirement.specifier) for requirement in map(Requirement, lines)}
    assert not any("<" in specifier for specifier in found.values())
    assert found["onnxruntime"].startswith(">=")
    assert found["apache-tvm-ffi"].startswith("==")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what git tracks, so that builds leave nothing here."""
    copy = tmp_path_factory.mktemp("source") / "relaxtune"
    for folder in (*ROOMS, "relaxtune"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outcome = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


# In a folder with a hostile `models/`, `pipeline/`, ... beside it, which raise when they are imported.
SCRIPT = """
import importlib, pathlib, sys
import relaxtune
assert not {"tvm", "onnx", "numpy"} & set(sys.modules), "the import is not light"
for name in relaxtune.__all__:
    getattr(relaxtune, name)
assert relaxtune.load_model("bert-tiny").inputs[0].name == "input_ids"
with relaxtune.open_database("tuning.db", mode="tune", create=True) as database:
    assert database.list_jobs() == []
names = {}
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None):
        names.setdefault(pathlib.Path(module.__file__).resolve(), set()).add(name)
ours = {path: found for path, found in names.items() if any(name.startswith("relaxtune") for name in found)}
assert len(ours) > 100
twice = [found for found in ours.values() if len(found) > 1]
assert not twice, twice
sys.path.remove(str(pathlib.Path(__file__).parent))
importlib.invalidate_caches()
bare = [name for name in ("models", "pipeline", "schedules", "tuning_db") if importlib.util.find_spec(name)]
assert not bare, bare
print(relaxtune.__version__, pathlib.Path(relaxtune.__file__).resolve())
"""


@pytest.mark.quick_cases("wheel")
@pytest.mark.parametrize("how", ["editable", "wheel", "sdist"])
def test_installed_package_is_one_name_and_not_broken_by_a_users_folders(how: str, source: Path, tmp_path) -> None:
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))
    # Everything but this project is taken from the environment of the tests.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    what = [source]
    if how == "editable":
        what = ["--editable", source]
    elif how == "sdist":
        build = "import setuptools.build_meta, sys; setuptools.build_meta.build_sdist(sys.argv[1])"
        run(sys.executable, "-c", build, tmp_path, cwd=source)
        what = list(tmp_path.glob("relaxtune-*.tar.gz"))
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--no-compile", "--ignore-installed", *what, cwd=tmp_path)
    folder = tmp_path / "user"
    for name in ROOMS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise RuntimeError('the folder of the user was imported')")
    (folder / "script.py").write_text(SCRIPT)
    version, place = run(python, "script.py", cwd=folder).split()
    assert version == relaxtune.__version__
    assert Path(place).is_relative_to(source if how == "editable" else site)
    for command in ([environment / "bin" / "relaxtune"], [python, "-m", "relaxtune"]):
        assert run(*command, "--version", cwd=folder).split() == ["relaxtune", version]
    if how != "editable":
        installed = {path.relative_to(site / "relaxtune") for path in (site / "relaxtune").rglob("*.*")}
        ours = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.*")}
        missing = {path for path in ours - installed if "__pycache__" not in path.parts and path.suffix != ".md"}
        assert not missing
        assert Path("py.typed") in installed
        assert not {path.name for path in site.iterdir()} & set(ROOMS)


def test_public_names_are_all_there_and_listed() -> None:
    from relaxtune import api

    words = {name for name, value in vars(api).items() if getattr(value, "__module__", "") == api.__name__}
    assert {word for word in words if not word.startswith("_")} <= set(relaxtune.__all__)
    assert sorted(relaxtune.__all__) == relaxtune.__all__ == dir(relaxtune)
    for name in relaxtune.__all__:
        assert getattr(relaxtune, name) is not None
    with pytest.raises(AttributeError, match=r"has no attribute 'tunes'; its names are in relaxtune.__all__"):
        relaxtune.tunes  # noqa: B018
