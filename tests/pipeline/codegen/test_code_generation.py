"""What happens to kernels after their hash is taken is what the hash's version of code generation stands for.

A failure means that code is generated differently: raise the kind's number in `CODE_GENERATION`, so that records
measured before are measured again, and write the new digest here. A change that keeps the code needs the digest alone.
"""

from __future__ import annotations

import hashlib

import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from relaxtune.pipeline.codegen import cubins
from relaxtune.pipeline.codegen.cuda_source import DeviceSource
from relaxtune.pipeline.codegen.kernel_hash import CODE_GENERATION
from relaxtune.schedules.cpu.vector_math import keep_erf_in_vectors, register_vector_math

DIGESTS = {"llvm": (2, "1d685af76c41e18f"), "cuda": (1, "e28d0dc6ba6f4079")}
SOURCE = """
#include <cuda.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cuda/barrier>
using cuda::std::enable_if;
extern "C" __global__ void main_kernel(half* x, const __grid_constant__ CUtensorMap map) {
  alignas(64) float sums[16];
  sums[0] = INFINITY;
  x[0] = sums[0];
}
"""


@T.prim_func(private=True, s_tir=True)
def functions(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")) -> None:
    for outer in T.serial(4):
        for lane in T.vectorized(16):
            # A name for the element would be a scalar, and nothing a vector.
            y[outer * 16 + lane] = (
                T.exp(x[outer * 16 + lane])
                + T.erf(x[outer * 16 + lane])
                + T.tanh(x[outer * 16 + lane])
                + T.sigmoid(x[outer * 16 + lane])
                + T.pow(x[outer * 16 + lane], T.float32(3))
            )


def lowered_functions(_: pytest.MonkeyPatch) -> str:
    """Return the hash of exp, erf, tanh, sigmoid and a power as LLVM gets them."""
    register_vector_math()
    target = tvm.target.Target("llvm")
    module = tvm.IRModule({"main": functions.with_attr("global_symbol", "main")})
    module = tirx.transform.BindTarget(target)(keep_erf_in_vectors(module))
    for step in (tirx.transform.VectorizeLoop(), tirx.transform.LowerIntrin()):
        module = step(module)
    return f"{tvm_ffi.structural_hash(module['main'].body, map_free_vars=True) % 2**64:016x}"


def prepared_source(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the digest of what NVRTC gets: CUDA source, headers and options."""
    given: list[object] = []

    def compile_(source: DeviceSource, options: list[str], *_: object) -> bytes:
        given.extend((source.code, sorted(source.headers.items()), sorted(options)))
        return b""

    monkeypatch.setattr(cubins, "_nvrtc", compile_)
    cubins.compile_with_nvrtc(SOURCE, "sm_90a", cubins.CompileOptions(()))
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


@pytest.mark.skipif(tvm.__version__ != "0.27.0.post1", reason="hashes of TIR belong to one version of TVM")
@pytest.mark.parametrize(("kind", "probe"), [("llvm", lowered_functions), ("cuda", prepared_source)])
def test_code_generation_is_that_of_its_version(kind, probe, monkeypatch) -> None:
    assert (CODE_GENERATION[kind], probe(monkeypatch)) == DIGESTS[kind]
