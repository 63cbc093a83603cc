"""The C++ runtime beside the Python one: bits, latency, cold start, memory, and the size of what is shipped.

    python -m benchmarks.artifacts.bench_cpp_runtime [--target llvm|cuda] [--models bert-tiny ...] [--results FILE]

Each runs in processes of its own, which take turns; a process loads, runs once, then runs many times on zeros, with its
outputs on the host. The library is built here with g++ -O2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import site
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi

import relaxtune
from benchmarks.this_run import run_facts
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.validate.builds import reference_model
from relaxtune.pipeline.validate.validation import sample_inputs

RESULTS = Path(__file__).parents[1] / "results"
SOURCES = Path(relaxtune.__file__).parent / "pipeline/artifact/cpp"
CLIENT = Path(__file__).parents[2] / "tests/pipeline/artifact/cpp/client.py"
TVM, FFI = (Path(module.__file__).parent for module in (tvm, tvm_ffi))
ROUNDS, RUNS = 5, 200
_PYTHON = """
import resource, sys, time
began = time.perf_counter()
import numpy as np
from relaxtune import load
module = load(sys.argv[1])
loaded = time.perf_counter() - began
inputs = {s.name: np.zeros([16 if isinstance(a, str) else a for a in s.shape], s.dtype) for s in module.inputs}
module.run(inputs)
first = time.perf_counter() - began
latencies = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    module.run(inputs)
    latencies.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
median = sorted(latencies)[len(latencies) // 2]
print(f"load_ms {1e3 * loaded:.3f} first_ms {1e3 * first:.3f} median_ms {1e3 * median:.4f} peak_kb {peak}")
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Return the library and the example program."""
    library, program = folder / "librelaxtune_runtime.so", folder / "relaxtune_example"
    folders = [f"-I{SOURCES / 'include'}", f"-I{FFI / 'include'}"]
    links = [f"-L{TVM / 'lib'}", "-ltvm_runtime", f"-L{FFI / 'lib'}", "-ltvm_ffi", "-ldl"]
    paths = [f"-Wl,-rpath,{place}" for place in (folder, TVM / "lib", FFI / "lib")]
    common = ["g++", "-std=c++17", "-O2", *folders]
    sources = sorted((SOURCES / "src").glob("*.cc"))
    subprocess.run([*common, "-fPIC", "-shared", *sources, *links, *paths, "-o", library], check=True)
    example = SOURCES / "example/main.cc"
    subprocess.run([*common, example, f"-L{folder}", "-lrelaxtune_runtime", *links, *paths, "-o", program], check=True)
    return library, program


def measure(model: str, target: str, precision: str | None, place: Path, built: tuple[Path, Path]) -> dict[str, object]:
    """Return what both are like on one model."""
    artifact = relaxtune.compile(model, place, samples=0, target=target, precision=precision).directory
    library, program = built
    arms = {"python": [sys.executable, "-c", _PYTHON], "cpp": [str(program)]}
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm, words in arms.items():
            found[arm].append(_told(_run([*words, str(artifact), str(RUNS)])))
    module = Module.load(artifact)
    inputs = sample_inputs(reference_model(module), samples=1, seed=0)[0]
    given, made = place.parent / "given", place.parent / "made"
    for one in (given, made):
        one.mkdir(exist_ok=True)
    np.savez(given / "call.npz", **inputs)
    _run([sys.executable, *map(str, (CLIENT, library, artifact, given, made))])
    expected = module.run(inputs)
    with np.load(made / "call.npz") as got:
        same = all(got[name].tobytes() == array.tobytes() for name, array in expected.items())
    medians = {
        arm: {key: statistics.median(one[key] for one in told) for key in told[0]} for arm, told in found.items()
    }
    return {"model": model, "precision": precision, "same_bits": same, "runs": RUNS, **medians, "raw": found}


def shipped_bytes(built: tuple[Path, Path], target: str) -> dict[str, dict[str, int]]:
    """Return the files that each needs beside the artifact, without CUDA's own."""
    needed = [built[0], TVM / "lib/libtvm_runtime.so", FFI / "lib/libtvm_ffi.so"]
    needed += [TVM / "lib/libtvm_runtime_cuda.so"] if target.startswith("cuda") else []
    names = ("tvm", "tvm_ffi", "numpy", "safetensors", "onnx", "scipy")
    folders = {name: Path(str(importlib.import_module(name).__file__)).parent for name in names}
    return {
        "cpp": {path.name: path.stat().st_size for path in needed},
        "python": {name: _size(folder) for name, folder in folders.items()},
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _run(words: list[str]) -> str:
    libraries = [str(path) for root in site.getsitepackages() for path in sorted(Path(root).glob("nvidia/*/lib"))]
    paths = os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])
    # Python's own start is with bytecode, as an installed package has it.
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "bytecode")}
    began = time.perf_counter()
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **bytecode, "LD_LIBRARY_PATH": paths}
    )
    if done.returncode:
        raise SystemExit(f"{words[0]}: {done.stderr}")
    return f"{done.stdout} process_ms {1e3 * (time.perf_counter() - began):.1f}"


def _told(text: str) -> dict[str, float]:
    words = text[text.index("load_ms") :].split()
    return {key: float(value) for key, value in zip(words[::2], words[1::2], strict=True)}


def main() -> None:
    """Build, measure every model, print a line each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--models", nargs="+", default=["bert-tiny", "gpt2-tiny", "vit-tiny"])
    parser.add_argument("--precision", default=None)
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--results", type=Path, default=None)
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder))
        for model in asked.models:
            entry = measure(model, asked.target, asked.precision, Path(folder) / model, built)
            found.append(entry)
            print({key: value for key, value in entry.items() if key != "raw"}, flush=True)
        facts = run_facts(asked.target)
        document = {
            "machine": {**facts, "commit": asked.commit or facts["commit"]},
            "target": asked.target,
            "shipped_bytes": shipped_bytes(built, asked.target),
            "cases": found,
        }
    place = asked.results or RESULTS / ("h200-cpp-runtime.json" if "cuda" in asked.target else "cpu-cpp-runtime.json")
    place.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
