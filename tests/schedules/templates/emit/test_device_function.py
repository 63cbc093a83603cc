from __future__ import annotations

import pytest

from relaxtune.schedules.templates.emit.device_function import device_call, last_function

HELPER = "__forceinline__ __device__ float relaxtune_half(float x) { return x / 2; }\n"


@pytest.mark.parametrize(
    ("head", "dtype"),
    [
        ("__forceinline__ __device__ float relaxtune_f(", "float32"),
        ("__forceinline__ __device__ unsigned relaxtune_f(", "uint32"),
        ("__forceinline__ __device__ unsigned long long relaxtune_f(", "uint64"),
        ("template <typename M>\n__forceinline__ __device__ void relaxtune_f(", "void"),
    ],
)
def test_last_function_of_a_source_is_called_by_its_name_and_type(head: str, dtype: str) -> None:
    source = f"{HELPER}{head}) {{ relaxtune_half(1.0f); }}"
    assert last_function(source)[1] == "relaxtune_f"
    assert repr(device_call(source).ty) == f"T.{dtype}"
