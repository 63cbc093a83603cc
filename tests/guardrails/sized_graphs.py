"""Random graphs with symbolic axes: a few steps of `sized_steps` one after another; several outputs."""

from __future__ import annotations

import contextlib

import numpy as np

from relaxtune.polynomials import Polynomial
from tests.guardrails.sized_drawing import OPSETS, SizedDrawing, Sizes
from tests.guardrails.sized_steps import STEPS, WIDTHS


def draw_sized(seed: int) -> tuple[SizedDrawing, list[str]]:
    """Return a graph of up to ten steps over symbolic axes, and its outputs: the last tensor, and up to two more."""
    rng = np.random.default_rng([seed, 41])
    d = SizedDrawing(rng, opset=int(rng.choice(OPSETS)), dtype="float16" if rng.random() < 0.2 else "float32")
    batch, n = Polynomial.symbol("batch"), Polynomial.symbol("n")
    start: Sizes = d.choice(
        (batch, n, d.choice(*WIDTHS)), (batch, d.choice(2, 4), n), (n, d.choice(*WIDTHS)), (batch, n),
        (batch, 2, n, d.choice(*WIDTHS)), (d.choice(1, 2), n, d.choice(*WIDTHS)),
    )  # fmt: skip
    d.keep(d.input(d.dtype, start), start)
    for _ in range(int(rng.integers(3, 11))):
        with contextlib.suppress(LookupError):  # no tensor has what the step needs
            d.choice(*STEPS)(d)
    made = [name for name in d.shapes if name not in d.inputs]
    if not made:
        name, shape = d.pick()
        d.keep(d.node("Neg", name), shape)
        made = [next(reversed(d.shapes))]
    others = [name for name in made[:-1] if d.chance(0.25)][:2]
    return d, [*others, made[-1]]
