from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import special
from tvm import tirx

from relaxtune.schedules.templates.emit import fast_math
from relaxtune.schedules.templates.emit.fast_math import fast_gelu as fast

HALF, ONE, ROOT = (tirx.const(value, "float32") for value in (0.5, 1.0, 0.5**0.5))
SMALL = tirx.const(0.044715, "float32")
X, Y = tirx.Var("x", "float32"), tirx.Var("y", "float32")


TANH_FORM = HALF * X * (ONE + tirx.tanh(tirx.const(0.7978845608, "float32") * X * (ONE + SMALL * X * X)))
CUBED = X * (HALF + HALF * tirx.tanh(tirx.const(0.7978845608, "float32") * (X + SMALL * X * X * X)))


def erf(value: tirx.Expr) -> tirx.Expr:
    return tirx.erf(value)


@pytest.mark.parametrize(
    "product",
    [
        X * (HALF + erf(X * ROOT) * HALF),
        X * HALF * (ONE + erf(X / tirx.const(2**0.5, "float32"))),
        (erf(ROOT * X) + ONE) * (HALF * X),
        (X + Y) * (HALF + HALF * erf((X + Y) * ROOT)),
        TANH_FORM,
        CUBED,
    ],
)
def test_forms_of_gelu_become_one_call(product: tirx.Expr) -> None:
    text = fast(product).script()
    assert "relaxtune_gelu" in text
    assert "erf(" not in text
    assert "T.tanh(" not in text


@pytest.mark.parametrize(
    "product",
    [
        X * (HALF + erf(Y * ROOT) * HALF),
        X * (HALF + erf(X) * HALF),
        X * (ONE + erf(X * ROOT)),
        X * (HALF + erf(X * ROOT)),
        X * Y * (HALF + erf(X * ROOT) * HALF),
        X * erf(X * ROOT),
        X * (HALF + HALF * tirx.tanh(X)),
        X * (HALF + HALF * tirx.tanh(tirx.exp(X))),
        X * Y,
    ],
)
def test_other_products_are_left(product: tirx.Expr) -> None:
    assert fast(product).same_as(product)


def test_gelu_is_within_its_stated_error() -> None:
    """The coefficients of the CUDA source, evaluated in float32 steps."""
    head, *rest = [np.float32(text) for text in re.findall(r"-?\d\.\d{5,}", fast_math._GELU_SOURCE)]
    assert len(rest) == 4
    x = np.linspace(-12, 12, 200_001, dtype=np.float32)
    t = np.abs(x)
    q = np.full_like(t, head)
    for coefficient in rest:
        q = q * t + coefficient
    found = np.maximum(x, 0) - t * np.exp2(-t * q - 1)
    wide = x.astype(np.float64)
    error = np.abs(found - wide * 0.5 * (1 + special.erf(wide * 0.5**0.5)))
    assert (error <= 5e-7 * np.abs(wide) + 1e-12).all()
    # Relative to float16's spacing of the result, it is nothing.
    assert error.max() < 3e-6


def test_tanh_form_is_within_its_stated_error() -> None:
    third, first = (np.float32(text) for text in re.findall(r"-\d\.\d{5,}", fast_math._GELU_TANH_SOURCE))
    x = np.linspace(-12, 12, 200_001, dtype=np.float32)
    # Far below zero the power is infinite and the quotient 0, as on the GPU.
    with np.errstate(over="ignore"):
        found = x / (1 + np.exp2(x * (third * (x * x) + first)))
    wide = x.astype(np.float64)
    u = (2 / np.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    assert (np.abs(found - 0.5 * wide * (1 + np.tanh(u))) <= 1e-6 * np.abs(wide) + 1e-12).all()
