"""Quotients and rests by symbolic sizes are those of integers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.division import Divisor

_MOST = 2**31 - 1
_NUMBERS = 4096


@pytest.fixture(scope="module")
def divide() -> tvm.runtime.Module:
    """A function of numbers, a vector as long as the divisor less its base, quotients and rests."""
    size, base = tirx.Var("size", "int64"), tirx.Var("base", "int64")
    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        numbers = T.arg("numbers", T.Buffer([_NUMBERS], "int32"))
        T.arg("long", T.Buffer([size], "int8"))
        T.arg("base", base)
        quotients = T.arg("quotients", T.Buffer([_NUMBERS], "int32"))
        rests = T.arg("rests", T.Buffer([_NUMBERS], "int32"))
        divisor = Divisor.of(size + base)
        with T.serial(_NUMBERS) as place:
            quotient, rest = divisor.divide(numbers[place])
            T.buffer_store(quotients, quotient, [place])
            T.buffer_store(rests, rest, [place])
    return tvm.compile(builder.get().with_attr("global_symbol", "main"), target="llvm")


@pytest.mark.parametrize(
    "size", [1, 2, 3, 5, 7, 8, 50, 333, 512, 4095, 4096, 4097, 65535, 641 * 6700417 // 8, 2**30, 2**30 + 1, _MOST]
)
def test_quotient_and_rest_are_those_of_integers(size: int, divide: tvm.runtime.Module) -> None:
    rng = np.random.default_rng(size)
    numbers = rng.integers(0, _MOST, _NUMBERS, endpoint=True)
    # Beside multiples of the size, where a quotient changes.
    near = (numbers // size * size)[:, None] + np.array([-1, 0, 1])
    few = np.concatenate([np.arange(64), near.ravel(), [_MOST - 1, _MOST]])
    few = few[(few >= 0) & (few <= _MOST)]
    numbers[: few.size // 4] = rng.choice(few, few.size // 4, replace=False)
    numbers[-2:] = _MOST - 1, _MOST
    array = tvm.runtime.tensor(numbers.astype("int32"))
    quotients, rests = (tvm.runtime.tensor(np.zeros(_NUMBERS, "int32")) for _ in range(2))
    divide["main"](array, tvm.runtime.tensor(np.zeros(1, "int8")), size - 1, quotients, rests)
    np.testing.assert_array_equal(quotients.numpy(), numbers // size)
    np.testing.assert_array_equal(rests.numpy(), numbers % size)


def test_known_size_is_left_to_the_compiler() -> None:
    number = tirx.Var("number", "int32")
    quotient, rest = Divisor.of(48).divide(number)
    assert isinstance(quotient, tirx.FloorDiv)
    assert isinstance(rest, tirx.FloorMod)
