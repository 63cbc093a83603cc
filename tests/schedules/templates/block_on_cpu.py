"""A whole kernel's own source on the CPU: all threads of a block after another, block by block.

What the source asks of a GPU, `block_on_cpu.h` has for a processor: barriers, what lanes show each other, ldmatrix,
mma.sync of float16, and copies that arrive where they are waited for. Blocks, or clusters of them, run in the order of
their numbers, so that one may wait for those of lower numbers. Shared memory that nothing wrote is NaN.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compiler import COMPILE_CALLBACK, cuda_compiler
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.lowering import register_mixed_pipeline

_COMPILE = ["g++", "-O1", "-w", "-std=c++20", "-fpermissive", "-fPIC"]
_HEADER_FILE = Path(__file__).with_suffix(".h")
_HEADER = _HEADER_FILE.read_text(encoding="utf-8")
# After what TVM puts before every kernel.
_HEADER_END = "#define ushort unsigned short\n#endif\n"
_FUNCTION = re.compile(r"__forceinline__ __device__ [\w ]+?(\w+)\([^{]*\) \{.*?(?:\n| )\}(?=\n)", re.DOTALL)
_WAIT = re.compile(r"relaxtune_copies_(of_block_)?but_(\d+)")
_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];")
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\((\d+)\) )?main_kernel\(([^)]*)\);')
_SET = re.compile(r"asm volatile\(\"st\.release[^(]*\(__cvta_generic_to_global\(([^)]*)\)\)[^;]*;")
_READ = re.compile(r"asm volatile\(\"ld\.acquire[^(]*\((\w+)\)[^(]*\(__cvta_generic_to_global\(([^)]*)\)\)[^;]*;")


def run_on_cpu(
    kernel: tirx.PrimFunc,
    target: ResolvedTarget,
    arrays: Mapping[str, np.ndarray],
    blocks: int,
    folder: Path,
    sizes: Sequence[int] = (),
    cluster: int = 1,
) -> None:
    """Run a kernel on arrays by the names of its parameters; it writes the outputs among them.

    `sizes` are what the host computes of symbolic sizes, in the kernel's order. `cluster` blocks run together.
    """
    source = _translated(cuda_source(kernel, target))
    library = folder / "kernel.so"
    command = [*_COMPILE, "-shared", "-include", _precompiled_header(), "-x", "c++", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
    found = _KERNEL.search(source)
    assert found is not None
    names = [text.split()[-1].removesuffix("_ptr") for text in found.group(2).split(",") if "*" in text]
    given = [arrays[name] for name in names] + [np.array([size], "int64") for size in sizes]
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in given]
    shared_bytes = cuda_limits(target).shared_bytes_optin
    stuck = ctypes.CDLL(str(library)).run(
        blocks, int(found.group(1)), shared_bytes, cluster, (ctypes.c_void_p * len(pointers))(*pointers)
    )
    assert stuck == -1, f"threads of block {stuck} wait for ever"


@functools.cache
def _precompiled_header() -> Path:
    """Return a copy of the header that the compiler has read: to read it anew is two thirds of each compilation."""
    folder = tempfile.mkdtemp(prefix="block-on-cpu")
    atexit.register(shutil.rmtree, folder)
    header = Path(shutil.copy(_HEADER_FILE, folder))
    subprocess.run([*_COMPILE, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
    return header


def cuda_source(kernel: tirx.PrimFunc, target: ResolvedTarget) -> str:
    """Return the CUDA source of a scheduled function, without compiling it."""
    sources: list[str] = []

    def keep(code: str) -> bytes:
        sources.append(code)
        return b"\x7fELF"

    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with cuda_compiler(target.arch):
        # `cuda_compiler` puts back what it found.
        tvm_ffi.register_global_func(COMPILE_CALLBACK, keep, override=True)
        tvm.tirx.build(module, target=target.target, pipeline=register_mixed_pipeline())
    return sources[0]


def _translated(source: str) -> str:
    """Return the source for a processor, with a function `run(blocks, threads, bytes, cluster, pointers)`."""
    _, _, kernel = source.partition(_HEADER_END)
    kept = _FUNCTION.sub(_function, kernel)
    kept = _SHARED.sub(r"uchar* \1 = (uchar*)shared_memory.data();", kept)
    found = _KERNEL.search(kept)
    assert found is not None, "no kernel"
    types = [text.replace("__restrict__", "").rsplit(maxsplit=1)[0] for text in found.group(2).split(",")]
    given = ", ".join(
        f"({kind})arguments[{number}]" if "*" in kind else f"*({kind}*)arguments[{number}]"
        for number, kind in enumerate(types)
    )
    return f"""{kept}
static void** arguments;
static void begin() {{
  main_kernel({given});
  current->done = true;
}}
extern "C" int run(int blocks, int threads, int bytes, int cluster, void** given) {{
  arguments = given;
  return run_blocks(blocks, threads, bytes, cluster);
}}
"""


def _function(match: re.Match[str]) -> str:
    """Return what stands for a function of the source: nothing where the header has it."""
    wait = _WAIT.fullmatch(match.group(1))
    if wait is not None:
        then = "__syncthreads" if wait.group(1) else "__syncwarp"
        return f"inline void {match.group(1)}() {{ wait_for_copies({wait.group(2)}); {then}(); }}"
    if re.search(rf"\b{match.group(1)}\(", _HEADER):
        return ""
    return _READ.sub(r"\1 = *(\2);", _SET.sub(r"*(\1) = 1;", match.group(0)))
