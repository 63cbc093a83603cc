"""Write the hash of every kernel that the templates make of the tests' functions, or compare two such files.

    python -m tests.schedules.templates.kernel_hashes write FILE [--cases TEXT] [--kernels 3]
    python -m tests.schedules.templates.kernel_hashes compare BEFORE AFTER

Each function is given to each template for sm_90a and sm_80: the decisions that it proposes, in their order, are one
hash, and of the first ones, the middle one and the last one each kernel has its own, with its predicted times. No code
is generated: the hash of a function is that of its CUDA source. `--cases` takes those whose names hold a text.
`compare` exits 1 when anything differs. Whole models: `python -m benchmarks.whole_models.kernel_hashes`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import tvm_ffi
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR, NAMED_ROWS_ATTR, ROWS_MAX_ATTR
from relaxtune.schedules.registry import LIBRARIES, TEMPLATES
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import Parameters, Template, TemplateError
from tests.schedules import attention_cases
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates import eightbit_cases, gemv_cases, memory_cases
from tests.schedules.templates.gemv_cases import GemvCase
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import NormCase
from tests.schedules.templates.rotated_cases import RotatedCase

Facts = dict[str, dict[str, str]]
TARGETS = ("cuda:sm_90a", "cuda:sm_80")
BATCH, LENGTH, PAST = (tirx.Var(name, "int64") for name in ("batch", "length", "past"))
_ROWS = (None, 7, 300)
_TABLES = ("ranges", "attention_sm90_table")
_TIMES = (1, 200, 5000)


def functions() -> Iterator[tuple[str, Callable[[], tirx.PrimFunc]]]:
    """Yield names and makers of the functions."""
    for name, case in (*_matmuls(), *_norms(), *_rotated(), *_memory()):
        yield name, case.func
    for name, gemv in {**gemv_cases.CASES, **_gemvs()}.items():
        yield f"few rows: {name}", gemv.func
    for name, attention in _attentions():
        yield f"attention: {name}", lambda attention=attention: attention_function(*attention.made())
    symbolic = MatmulCase((BATCH, LENGTH), 768, 512, ("bias", "gelu"))
    for name, case in (("rows", symbolic), ("float32 rows", replace(symbolic, dtype="float32", output="float32"))):
        yield f"symbolic: {name}", case.func
        yield f"symbolic: {name} of at most 40", lambda case=case: case.func().with_attr(ROWS_MAX_ATTR, 40)
        yield f"symbolic: {name}, some named", lambda case=case: case.func().with_attr(NAMED_ROWS_ATTR, [77, 1000])
    for name, attention in _symbolic_attentions():
        yield f"symbolic: attention, {name}", lambda attention=attention: attention_function(*attention.made())
    for name, memory in _symbolic_memory():
        yield f"symbolic: {name}", memory.func


def _matmuls() -> Iterator[tuple[str, MatmulCase]]:
    for rows, n, k in ((3, 512, 256), (77, 776, 264), (1024, 768, 768), (4096, 3072, 768)):
        for steps in (("bias", "gelu"), ("half_bias", "residual")):
            yield f"matmul: {rows} x {n} x {k}, {' '.join(steps)}", MatmulCase((rows,), n, k, steps)
    base = MatmulCase((2, 130), 400, 264)
    for steps in (("gated",), ("row_scale",), ("masked",), ("gelu_tanh",), ("squared", "shifted")):
        yield f"matmul: {' '.join(steps)}", replace(base, epilogue=steps)
    yield "matmul: bfloat16, of rows", replace(base, dtype="bfloat16", output="float32", transposed=True, n=401)
    yield "matmul: float32", replace(base, dtype="float32", output="float32", epilogue=("bias", "residual"))
    yield "matmul: float32, of rows", replace(base, dtype="float32", output="float32", transposed=True)
    for name, case in {**eightbit_cases.EXACT, **eightbit_cases.FLOATS}.items():
        yield f"matmul: {name}", case[0] if isinstance(case, tuple) else case


def _norms() -> Iterator[tuple[str, NormCase]]:
    for rows in (5, 130, 1024):
        matmul = MatmulCase((rows,), 512, 768, ("bias", "residual"))
        yield f"norm: {rows} rows, operand", NormCase(matmul, operand=True, shifted=True, keeps=True)
        yield f"norm: {rows} rows, residual and sums", NormCase(matmul, group=32, residual=True, sums=True)
        yield f"norm: {rows} rows, not centred, sums", NormCase(matmul, operand=True, centred=False, sums=True)


def _rotated() -> Iterator[tuple[str, RotatedCase]]:
    for batch, positions in ((1, 1), (2, 8), (2, 128)):
        for turned in (True, False):
            case = RotatedCase(batch, positions, 512, 768, 512, 64, tables=batch, normed=turned, turned=turned)
            yield f"rotated: {batch} x {positions}{', rows' if turned else ''}", case


def _gemvs() -> dict[str, GemvCase]:
    long = GemvCase(n=2048, k=8192)
    return {
        "long": long,
        "long, 16 rows": replace(long, rows=(16,)),
        "long, 4 bits": replace(long, bits=4),
        "long, 8 bits, 16 rows": replace(long, rows=(16,), bits=8),
        "many rows, 4 bits": GemvCase(rows=(200,), n=512, k=512, bits=4, epilogue="bias"),
        "many rows, 8 bits, groups of 32": GemvCase(rows=(64,), n=512, k=512, bits=8, group=32),
    }


def _attentions() -> Iterator[tuple[str, AttentionCase]]:
    for name, case in attention_cases.CASES.items():
        if name in ("plain", "grouped", "causal", "window", "repeated", "distances", "guarded sum"):
            yield name, replace(case, head_dim=64, dtype="float16")
    bert = AttentionCase(8, 12, 512, 512, 64, dtype="float16", packed=True)
    yield "BERT", bert
    yield "BERT, padding", replace(bert, bias=("add", "float16", (8, 1, 1, 512)))
    yield "short, padding", replace(bert, batch=1, queries=77, keys=77, bias=("add", "float32", (1, 1, 1, 77)))
    yield "keep", replace(bert, queries=130, keys=130, bias=("keep", "bool", (8, 1, 130, 130)))
    llama = AttentionCase(1, 32, 1024, 1024, 128, kv_heads=8, dtype="bfloat16", causal=True)
    yield "Llama", llama
    yield "step", replace(llama, queries=1)
    yield "step of 16", replace(llama, batch=16, queries=1)
    yield "growing step", replace(llama, queries=1, keys=1025, past=1024, causal=False)
    yield "growing steps", replace(llama, batch=4, queries=3, keys=67, past=64)


def _symbolic_attentions() -> Iterator[tuple[str, AttentionCase]]:
    bert = AttentionCase(BATCH, 12, LENGTH, LENGTH, 64, dtype="float16", packed=True)
    yield "BERT", bert
    yield "padding", replace(bert, bias=("add", "float16", (BATCH, 1, 1, LENGTH)))
    llama = AttentionCase(BATCH, 8, LENGTH, LENGTH, 64, kv_heads=2, dtype="float16", causal=True)
    yield "Llama", llama
    yield "step", replace(llama, queries=1, keys=PAST + 1, past=PAST, causal=False)


def _memory() -> Iterator[tuple[str, memory_cases.MemoryCase]]:
    for rows, columns in ((7, 769), (512, 768), (4096, 4096)):
        shape = (rows, columns)
        yield f"memory: layer norm {shape}", memory_cases.layer_norm(shape, residual=True)
        yield f"memory: softmax {shape}", memory_cases.softmax(shape, masked=True)
        yield f"memory: gelu {shape}", memory_cases.bias_gelu(shape)
    yield "memory: RMS norm of float32", memory_cases.rms_norm((3, 20480), "float32")
    yield "memory: mean", memory_cases.mean((4, 128, 768))
    yield "memory: extremes", memory_cases.row_extremes((64, 100))
    yield "memory: embedding", memory_cases.embedding(128, 768, 1000)
    yield "memory: rotary", memory_cases.rotary(2, 16, 4, 64)
    yield "memory: transpose", memory_cases.transpose((2, 128, 12, 64), (0, 2, 1, 3))
    yield "memory: transpose of the last axis", memory_cases.transpose((8, 96, 64), (0, 2, 1))


def _symbolic_memory() -> Iterator[tuple[str, memory_cases.MemoryCase]]:
    yield "layer norm", memory_cases.layer_norm((BATCH, LENGTH, 768), residual=True)  # type: ignore[arg-type]
    yield "gelu", memory_cases.bias_gelu((BATCH, LENGTH, 3072))  # type: ignore[arg-type]
    yield "transpose", memory_cases.transpose((BATCH, LENGTH, 24), (0, 2, 1))  # type: ignore[arg-type]


def facts_of(func: tirx.PrimFunc, targets: Mapping[str, ResolvedTarget], kernels: int) -> dict[str, str]:
    """Return the hashes of all that the templates make of a function."""
    found: dict[str, str] = {}
    for target_name, target in targets.items():
        for name, maker in {**TEMPLATES, **LIBRARIES}.items():
            for rows in _ROWS if name not in _TABLES else (None,):
                offered = maker.candidates(func, target, rows)
                if isinstance(offered, Refusal):
                    continue
                place = f"{target_name} {name}{'' if rows is None else f' {rows} rows'}"
                texts = [one.to_json() for one in offered]
                found[place] = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
                picked = {0, len(texts) // 2, len(texts) - 1} if kernels > 1 else {0}
                for number in sorted(picked):
                    found[f"{place} {texts[number]}"] = _made(maker, func, target, offered[number], rows)
                if rows is not None:
                    times = [maker.predict_us(func, target, offered[0], count) for count in _TIMES]
                    found[f"{place} us"] = str(times)
    return found


def _made(maker: Template, func: tirx.PrimFunc, target: ResolvedTarget, own: Parameters, rows: int | None) -> str:
    try:
        made = maker.apply(func, target, own, rows)
    except TemplateError as error:
        return str(error)
    if isinstance(made, Refusal):
        return made.reason
    return f"{tvm_ffi.structural_hash(made, map_free_vars=True) % 2**64:016x}"


def write(path: Path, text: str, kernels: int) -> None:
    """Write the file, after every function."""
    targets = {name: resolve_target(name) for name in TARGETS}
    found: Facts = json.loads(path.read_text()) if path.exists() else {}
    started = time.monotonic()
    for name, make in functions():
        if text not in name or name in found:
            continue
        func = make()
        constant = {CONSTANT_PARAMS_ATTR: [1]} if func.attrs is None or CONSTANT_PARAMS_ATTR not in func.attrs else {}
        func = func.with_attrs(constant) if constant and "attention" not in name else func
        found[name] = facts_of(func, targets, kernels)
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {len(found[name])} facts, {time.monotonic() - started:.1f} s", flush=True)


def differences(before: Facts, after: Facts) -> Iterator[str]:
    """Yield a line for each fact that differs, of the functions in both files."""
    for name in sorted(before.keys() & after.keys()):
        for fact in sorted(before[name].keys() | after[name].keys()):
            was, now = before[name].get(fact), after[name].get(fact)
            if was != now:
                yield f"{name}: {fact}: {was or 'not there'} -> {now or 'not there'}"


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing, comparing = commands.add_parser("write"), commands.add_parser("compare")
    writing.add_argument("out", type=Path)
    writing.add_argument("--cases", default="", help="only functions whose names hold this text")
    writing.add_argument("--kernels", type=int, default=3, help="of each template: 1 for the first alone; default: 3")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.out, arguments.cases, arguments.kernels)
        return
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    lines = list(differences(before, after))
    print("\n".join(lines) or f"all kernels of {len(before.keys() & after.keys())} functions are the same")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
