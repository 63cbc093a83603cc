"""Write the hash of every kernel of the zoo's models, or compare two such files: what a change did to the kernels.

    python -m benchmarks.whole_models.kernel_hashes write FILE [--models MODEL ...] [--targets llvm,cuda:sm_90a]
    python -m benchmarks.whole_models.kernel_hashes compare BEFORE AFTER [--hash tir|code]

MODEL is `NAME[:fp16][+POLICY][@AXIS=SIZE,...]`, such as `bert-base-2-layers:fp16@batch=8,sequence=512`,
`bert-tiny+w8a16`, or `bert-tiny@sequence=n` for a symbolic axis. Default: every zoo model of full width, with at most
two layers. Kernels are made without records, as `relaxtune compile` makes them without a database. No code is
generated: neither a GPU nor a CUDA toolchain is needed. `tir` is the hash of the scheduled function, `code` that of
the function that goes to code generation. The hashes are made here and not by the product, so that they mean the same
in both commits. `compare` exits 1 when a kernel differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx

from relaxtune.models.dims import Dim, evaluate_dim
from relaxtune.models.zoo import get_preset, list_models
from relaxtune.models.zoo.presets import DEFAULT_DIMS
from relaxtune.pipeline.artifact.compile import apply_choices
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.cuda_graph import capture_whole_function
from relaxtune.pipeline.codegen.finish import finish_kernels
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.schedules.fallback import SCHEDULED_ATTR, apply_fallback
from relaxtune.schedules.targets import portable_host

Hashes = dict[str, dict[str, dict[str, str]]]

TARGETS = "llvm,cuda:sm_90a"
GRAPH = "(graph)"
_LAYERS = 2
_POLICIES = ("fp16", "bf16", "w8a16", "w4a16")
_TEXT = re.compile(r"(?P<source>[^+@]+)(\+(?P<policy>[^@]+))?(@(?P<axes>.+))?")


@dataclass(frozen=True)
class Case:
    """A zoo model, a precision policy, and sizes or names of axes."""

    source: str
    policy: str | None
    axes: Mapping[str, Dim]

    @property
    def shapes(self) -> dict[str, tuple[Dim, ...]]:
        """Input -> shape; empty without sizes."""
        if not self.axes:
            return {}
        inputs = get_preset(self.source.partition(":")[0]).inputs
        sizes = {**DEFAULT_DIMS, **self.axes}
        return {spec.name: tuple(_size(axis, sizes) for axis in spec.shape) for spec in inputs}


def parse_case(text: str) -> Case:
    """Return the case that a text of the command line names."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise SystemExit(f"{text!r} is no model: expected NAME[:fp16][+POLICY][@AXIS=SIZE,...]")
    pairs = (pair.split("=", 1) for pair in (match["axes"] or "").split(",") if pair)
    return Case(match["source"], match["policy"], {k: int(v) if v.isdigit() else v for k, v in pairs})


def default_models() -> list[str]:
    """Return the zoo's models, of two layers where they have more, and the tiny ones in every form."""
    names = []
    for name in list_models():
        layers = get_preset(name).config.layers
        if layers <= _LAYERS:
            names.append(name)
        elif "outliers" not in name:
            names.append(f"{name}-{_LAYERS}-layers")
    models = [f"{name}{suffix}" for name in names for suffix in ("", ":fp16")]
    models += [f"{name}+{policy}" for name in ("bert-tiny", "llama-tiny", "llama-tiny-decode") for policy in _POLICIES]
    models += ["bert-tiny@sequence=n", "llama-tiny:fp16@sequence=n", "gpt2-tiny-decode:fp16@past_sequence=n"]
    return [*models, "bert-base-2-layers:fp16@batch=8,sequence=512", "llama-1b-2-layers:fp16@batch=1,sequence=2048"]


def kernels_of(text: str, target: str) -> dict[str, dict[str, str]]:
    """Return each kernel's two hashes, and under `(graph)` that of the functions that call them."""
    case = parse_case(text)
    request = ModelRequest(case.source, case.shapes, target, LoweringOptions(precision=case.policy))
    prepared = prepare_model(request)
    lowered, resolved = prepared.lowered, portable_host(prepared.target)
    choices = select_kernels(lowered, prepared.tasks, database=None, target=resolved, environment=prepared.environment)
    mod = apply_choices(lowered.mod, choices)
    if resolved.kind == "cuda":
        mod = capture_whole_function(mod, len(lowered.graph.inputs))
    scheduled = apply_fallback(mod, resolved.target)
    finished = finish_kernels(scheduled, resolved.target)
    hashes = {name: {"tir": _hash(scheduled[name]), "code": _hash(finished[name])} for name in lowered.kernels}
    graph = _graph_hash(finished)
    return {**hashes, GRAPH: {"tir": graph, "code": graph}}


def write(path: Path, models: list[str], targets: list[str]) -> None:
    """Write the file, after every model, so that what was made is there when a run is stopped."""
    found: Hashes = {}
    for model in models:
        for target in targets:
            started = time.monotonic()
            try:
                found[f"{model}/{target}"] = kernels_of(model, target)
                told = f"{len(found[f'{model}/{target}']) - 1} kernels"
            except Exception as error:
                # A failure is a result, too: both commits must fail in the same way.
                told = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                found[f"{model}/{target}"] = {"(failed)": {"tir": type(error).__name__, "code": type(error).__name__}}
            print(f"{model} {target}: {told}, {time.monotonic() - started:.1f} s", flush=True)
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def differences(before: Hashes, after: Hashes, kind: str) -> Iterator[str]:
    """Yield a line for each model of one file alone, and for each kernel that differs."""
    for case in sorted(before.keys() | after.keys()):
        if case not in before or case not in after:
            yield f"{case}: only in the file of {'before' if case in before else 'after'}"
            continue
        old, new = before[case], after[case]
        for name in sorted(old.keys() | new.keys()):
            was, now = old.get(name, {}).get(kind), new.get(name, {}).get(kind)
            if was != now:
                yield f"{case} {name}: {was or 'not there'} -> {now or 'not there'}"


def _hash(func: tirx.PrimFunc) -> str:
    for name in ("global_symbol", SCHEDULED_ATTR):
        if func.attrs is not None and name in func.attrs:
            func = func.without_attr(name)
    return f"{tvm_ffi.structural_hash(func, map_free_vars=True) % 2**64:016x}"


def _graph_hash(mod: tvm.ir.IRModule) -> str:
    functions = {var: func for var, func in mod.functions_items() if isinstance(func, relax.Function)}
    module = tvm.IRModule(functions)
    return f"{tvm_ffi.structural_hash(module, map_free_vars=True) % 2**64:016x}"


def _size(axis: Dim, sizes: Mapping[str, Dim]) -> Dim:
    numbers = {name: size for name, size in sizes.items() if isinstance(size, int)}
    return sizes.get(axis, evaluate_dim(axis, numbers)) if isinstance(axis, str) else axis


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing, comparing = commands.add_parser("write"), commands.add_parser("compare")
    writing.add_argument("out", type=Path)
    writing.add_argument("--models", nargs="*", default=None)
    writing.add_argument("--targets", default=TARGETS, help=f"separated by commas; default: {TARGETS}")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--hash", choices=("tir", "code"), default="code")
    arguments = parser.parse_args()
    # Each kernel without a tuning task would be told.
    logging.getLogger("relaxtune").setLevel(logging.ERROR)
    if arguments.command == "write":
        write(arguments.out, arguments.models or default_models(), arguments.targets.split(","))
        return
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    lines = list(differences(before, after, arguments.hash))
    print("\n".join(lines) or f"all kernels of {len(after)} models and targets are the same ({arguments.hash})")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
