"""Calls of functions of CUDA source that a kernel brings along."""

from __future__ import annotations

import re
from functools import lru_cache

from tvm import tirx
from tvm.tirx.script import builder as T

_HEAD = re.compile(r"__device__ ([\w ]+?) (\w+)\(")
_DTYPES = {"float": "float32", "int": "int32", "unsigned": "uint32", "unsigned long long": "uint64"}


def device_call(source: str, *arguments: tirx.Expr) -> tirx.Expr:
    """Return a call of the last function of some CUDA source; those before it are what it needs."""
    returned, name = _last_function(source)
    return T.cuda.func_call(name, *arguments, source_code=source, return_type=_DTYPES.get(returned, "void"))


def function_name(source: str) -> str:
    """Return the name of the last function of some CUDA source."""
    return _last_function(source)[1]


@lru_cache(maxsize=256)
def _last_function(source: str) -> tuple[str, str]:
    returned, name = _HEAD.findall(source)[-1]
    return returned, name
