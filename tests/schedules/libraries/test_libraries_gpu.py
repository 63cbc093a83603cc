"""Calls of vendors' libraries on a GPU that has them: odd shapes, every epilogue and mask, against float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from scipy import special
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_libraries import offer_library
from relaxtune.pipeline.codegen.finish import device_toolchain, finish_kernels
from relaxtune.pipeline.codegen.library_objects import compile_library_objects, list_library_sources
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.libraries.vendors import CUBLASLT, CUDNN, VendorLibrary
from relaxtune.schedules.registry import LIBRARIES
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import Parameters, Template
from tests.schedules.attention_cases import AttentionCase, Params, draw, reference
from tests.schedules.templates.matmul_cases import MatmulCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device"),
]

SEEDS = 20
RAGGED = MatmulCase((129,), 200, 136, ("bias",))
MATMULS = {
    "plain": replace(RAGGED, epilogue=()),
    "prime sizes": replace(RAGGED, rows=(127,), n=131, k=113, transposed=True),
    "one row": replace(RAGGED, rows=(1,)),
    "float32 bias": RAGGED,
    "float32 bias and residual": replace(RAGGED, rows=(3, 43), epilogue=("bias", "residual")),
    "gelu's tanh form": replace(RAGGED, epilogue=("bias", "gelu_tanh")),
    "gelu": replace(RAGGED, epilogue=("bias", "gelu")),
    "half bias": replace(RAGGED, epilogue=("half_bias",)),
    "bfloat16": replace(RAGGED, dtype="bfloat16", output="bfloat16", epilogue=("bias", "residual")),
    "float32 output": replace(RAGGED, output="float32", epilogue=("bias", "residual")),
    "factors of rows": replace(RAGGED, epilogue=("row_scale",)),
}
PRIME = AttentionCase(2, 3, 127, 131, 64, dtype="float16")
ATTENTIONS = {
    "plain": PRIME,
    "one key and query": replace(PRIME, batch=1, heads=1, queries=1, keys=1),
    "packed": replace(PRIME, queries=128, keys=128, packed=True),
    "heads first, head of 128": replace(PRIME, heads_first=True, head_dim=128, dtype="bfloat16"),
    "head of 80": replace(PRIME, head_dim=80),
    "causal": replace(PRIME, causal=True),
    "window": replace(PRIME, queries=200, keys=207, causal=True, window=70),
    "window of both sides": replace(PRIME, queries=200, keys=200, window=33),
    "key padding": replace(PRIME, bias=("add", "float16", (2, 1, 1, 131))),
    "key padding of floats": replace(PRIME, bias=("add", "float32", (2, 1, 1, 131))),
    "relative bias": replace(PRIME, causal=True, queries=131, bias=("add", "float16", (1, 3, 131, 131))),
    "keep": replace(PRIME, bias=("keep", "bool", (2, 1, 127, 131))),
    "keep by number": replace(PRIME, bias=("keep", "int64", (2, 1, 1, 131))),
    "grouped": replace(PRIME, heads=8, kv_heads=2, causal=True, queries=131, packed=True),
    "decode": replace(PRIME, heads=8, kv_heads=2, queries=1, keys=1009, causal=True),
}


def compile_call(func: tirx.PrimFunc, maker: Template, parameters: Parameters, directory: Path) -> tvm.runtime.Module:
    target = resolve_target("cuda")
    made = maker.apply(func, target, parameters)
    assert isinstance(made, tirx.PrimFunc), made
    finished = finish_kernels(tvm.IRModule({"main": made.with_attr("global_symbol", "main")}), target.target)
    with device_toolchain(target.target), tvm.transform.PassContext(opt_level=3), target.target:
        built = tvm.compile(finished, target.target)
    objects = compile_library_objects(list_library_sources([made], "cuda"), directory)
    built.export_library(str(directory / "call.so"), addons=[str(one) for one in objects])
    return tvm.runtime.load_module(str(directory / "call.so"))


def need(library: VendorLibrary) -> None:
    if offer_library(library) is None:
        pytest.skip(f"needs {library.distribution}")


def first_of(maker: Template, func: tirx.PrimFunc, place: int = 0) -> Parameters:
    offered = maker.candidates(func, resolve_target("cuda"))
    assert not isinstance(offered, Refusal), offered
    return offered[place]


def poisoned(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.full(shape, np.nan, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def on_gpu(arrays: Sequence[np.ndarray]) -> list[tvm.runtime.Tensor]:
    return [tvm.runtime.tensor(array, tvm.cuda(0)) for array in arrays]


def matmul_arrays(case: MatmulCase, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = []
    for param in case.func().params[:-1]:
        dtype = str(param.ty.dtype)
        values = rng.standard_normal([int(size) for size in param.ty.shape])
        arrays.append(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    return arrays


def matmul_reference(case: MatmulCase, arrays: Sequence[np.ndarray]) -> np.ndarray:
    a, b, *others = (array.astype(np.float64) for array in arrays)
    value = a @ (b.T if case.transposed else b)
    for step in case.epilogue:
        if step in ("bias", "half_bias", "residual"):
            value = value + others.pop(0)
        elif step == "row_scale":
            value = value * others.pop(0)
        elif step == "gelu":
            value = value * (1 + special.erf(value / np.sqrt(2))) / 2
        else:
            value = value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3))) / 2
    return value


def check_matmul(case: MatmulCase, found: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
    expected = matmul_reference(case, arrays)
    assert np.isfinite(found).all()
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < {"float32": 1e-5, "float16": 8e-4, "bfloat16": 6e-3}[case.output]


@pytest.mark.parametrize("case", MATMULS.values(), ids=MATMULS.keys())
def test_matmul_agrees_with_float64(case: MatmulCase, tmp_path: Path) -> None:
    need(CUBLASLT)
    maker, func = LIBRARIES["cublaslt"], case.func()
    call = compile_call(func, maker, first_of(maker, func), tmp_path)
    for seed in range(SEEDS):
        arrays = matmul_arrays(case, seed)
        tensors = on_gpu([*arrays, poisoned((*case.rows, case.n), case.output)])
        call["main"](*tensors)
        check_matmul(case, tensors[-1].numpy().astype(np.float64), arrays)


def check_attention(case: AttentionCase, params: Params, found: np.ndarray, expected: np.ndarray) -> None:
    seen = ~np.isnan(expected)
    assert np.isfinite(found[seen]).all()
    error = np.linalg.norm((found - expected)[seen]) / np.linalg.norm(expected[seen])
    assert error < (6e-3 if case.dtype == "bfloat16" else 1e-3)


@pytest.mark.parametrize("case", ATTENTIONS.values(), ids=ATTENTIONS.keys())
def test_attention_agrees_with_float64(case: AttentionCase, tmp_path: Path) -> None:
    need(CUDNN)
    spec, params = case.made()
    maker, func = LIBRARIES["cudnn_attention"], attention_function(spec, params)
    call = compile_call(func, maker, first_of(maker, func), tmp_path)
    for seed in range(SEEDS):
        arrays = draw(params, spec, seed)
        tensors = on_gpu([*arrays, poisoned(*params[-1])])
        call["main"](*tensors)
        check_attention(case, params, tensors[-1].numpy().astype(np.float64), reference(spec, params, arrays))


def test_a_row_of_a_low_finite_mask_is_an_ordinary_softmax_and_one_of_minus_infinity_is_finite(tmp_path: Path) -> None:
    need(CUDNN)
    case = replace(PRIME, bias=("add", "float32", (2, 1, 127, 131)))
    spec, params = case.made()
    maker, func = LIBRARIES["cudnn_attention"], attention_function(spec, params)
    arrays = draw(params, spec, seed=0)
    arrays[3][0, 0, 5] = np.finfo(np.float32).min
    arrays[3][1, 0, 7] = -np.inf
    tensors = on_gpu([*arrays, poisoned(*params[-1])])
    compile_call(func, maker, first_of(maker, func), tmp_path)["main"](*tensors)
    found = tensors[-1].numpy().astype(np.float32)
    value = arrays[2].astype(np.float32)
    np.testing.assert_allclose(found[0, 5], value[0].mean(axis=0), atol=2e-3)
    assert np.isfinite(found).all()


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """Return what replays what a function launches, captured as a CUDA graph."""
    driver = pytest.importorskip("cuda.bindings.driver")

    def ask(name: str, *arguments: object) -> object:
        status, *values = getattr(driver, name)(*arguments)
        assert status == driver.CUresult.CUDA_SUCCESS, (name, status)
        return values[0] if values else None

    device = tvm.cuda(0)
    stream = device.create_raw_stream()
    device.set_raw_stream(stream)
    # Plans and memory are made by a run before the capture.
    run()
    device.sync(stream)
    handle = driver.CUstream(getattr(stream, "value", stream))
    ask("cuStreamBeginCapture", handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    run()
    graph = ask("cuGraphInstantiate", ask("cuStreamEndCapture", handle), 0)

    def replay() -> None:
        ask("cuGraphLaunch", graph, handle)
        ask("cuStreamSynchronize", handle)

    return replay


@pytest.mark.parametrize("place", [0, 1])
def test_calls_are_captured_in_a_cuda_graph(place: int, tmp_path: Path) -> None:
    need(CUBLASLT)
    need(CUDNN)
    case, attention = MATMULS["gelu"], ATTENTIONS["keep"]
    spec, params = attention.made()
    calls = []
    for name, func in (("cublaslt", case.func()), ("cudnn_attention", attention_function(spec, params))):
        folder = tmp_path / name
        folder.mkdir()
        calls.append(compile_call(func, LIBRARIES[name], first_of(LIBRARIES[name], func, place), folder)["main"])
    tensors = [
        on_gpu([*matmul_arrays(case, 0), poisoned((*case.rows, case.n), case.output)]),
        on_gpu([*draw(params, spec, 0), poisoned(*params[-1])]),
    ]
    try:
        replay = captured(lambda: [call(*given) for call, given in zip(calls, tensors, strict=True)])
        for seed in (1, 2):
            fresh = [matmul_arrays(case, seed), draw(params, spec, seed)]
            for given, arrays in zip(tensors, fresh, strict=True):
                for tensor, array in zip(given, [*arrays, np.full_like(given[-1].numpy(), np.nan)], strict=True):
                    tensor.copyfrom(array)
            tvm.cuda(0).sync()
            replay()
            check_matmul(case, tensors[0][-1].numpy().astype(np.float64), fresh[0])
            found = tensors[1][-1].numpy().astype(np.float64)
            check_attention(attention, params, found, reference(spec, params, fresh[1]))
    finally:
        tvm.cuda(0).set_raw_stream(0)
