"""Calls of PTX instructions, and of functions of CUDA source that a kernel brings along, such as copies to registers.

Copies of 1 to 16 bytes are PTX statements that a compiler keeps in their order. An ordinary load of a `__restrict__`
pointer may be moved above the wait for the kernel before (griddepcontrol.wait): nothing in the kernel writes what it
reads. A volatile statement stays behind one that stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from tvm import tirx
from tvm.tirx.script import builder as T

_HEAD = re.compile(r"__device__ ([\w ]+?) (\w+)\(")
_DTYPES = {"float": "float32", "int": "int32", "unsigned": "uint32", "unsigned long long": "uint64"}


@lru_cache(maxsize=256)
def instruction(name: str) -> Callable[..., tirx.Expr]:
    """Return what makes the call of a PTX instruction; TVM takes as long to find it as to make the call."""
    found: Callable[..., tirx.Expr] = T.ptx[name]
    return found


def device_call(source: str, *arguments: tirx.Expr) -> tirx.Expr:
    """Return a call of the last function of some CUDA source; those before it are what it needs."""
    returned, name = last_function(source)
    return T.cuda.func_call(name, *arguments, source_code=source, return_type=_DTYPES.get(returned, "void"))


@lru_cache(maxsize=256)
def last_function(source: str) -> tuple[str, str]:
    """Return the result type and the name of the last function of some CUDA source."""
    returned, name = _HEAD.findall(source)[-1]
    return returned, name


# Bytes -> the body of `void name(void* to, const void* from)`.
_LOADS = {
    16: """uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  *reinterpret_cast<uint4*>(to) = v;""",
    8: """uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  *reinterpret_cast<uint2*>(to) = v;""",
    4: """unsigned v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  *reinterpret_cast<unsigned*>(to) = v;""",
    2: """unsigned short v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(from));
  *reinterpret_cast<unsigned short*>(to) = v;""",
    1: """unsigned short v;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(v) : "l"(from));
  *reinterpret_cast<unsigned char*>(to) = static_cast<unsigned char>(v);""",
}
_STORES = {
    16: """uint4 v = *reinterpret_cast<const uint4*>(from);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");""",
    8: """uint2 v = *reinterpret_cast<const uint2*>(from);
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(to), "r"(v.x), "r"(v.y) : "memory");""",
    4: """unsigned v = *reinterpret_cast<const unsigned*>(from);
  asm volatile("st.global.u32 [%0], %1;" :: "l"(to), "r"(v) : "memory");""",
    2: """unsigned short v = *reinterpret_cast<const unsigned short*>(from);
  asm volatile("st.global.u16 [%0], %1;" :: "l"(to), "h"(v) : "memory");""",
    1: """unsigned short v = *reinterpret_cast<const unsigned char*>(from);
  asm volatile("st.global.u8 [%0], %1;" :: "l"(to), "h"(v) : "memory");""",
}


def load_bytes(to: tirx.Expr, source: tirx.Expr, size: int) -> None:
    """Emit a load of 1, 2, 4, 8 or 16 bytes (the address a multiple of it) from global memory to registers."""
    T.evaluate(device_call(load_source(size), to, source))


def load_source(size: int) -> str:
    """Return the function `relaxtune_load_SIZE(to, from)` of `load_bytes`."""
    return _function(f"relaxtune_load_{size}", _LOADS[size])


def store_bytes(to: tirx.Expr, source: tirx.Expr, size: int) -> None:
    """Emit a store of 1, 2, 4, 8 or 16 bytes (the address a multiple of it) from registers to global memory."""
    T.evaluate(device_call(_function(f"relaxtune_store_{size}", _STORES[size]), to, source))


def _function(name: str, body: str) -> str:
    return f"\n__forceinline__ __device__ void {name}(void* to, const void* from) {{\n  {body}\n}}\n"
