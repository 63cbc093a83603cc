"""Convolutions and poolings with channels last against the same functions unscheduled."""

from __future__ import annotations

import math

import pytest
from tvm import te, tirx

from relaxtune.schedules.cpu.any_size.windows import (
    Geometry,
    convolution,
    depthwise_convolution,
    filters_width,
    largest,
    mean,
)
from relaxtune.schedules.cpu.base import cpu_limits
from relaxtune.schedules.targets import resolve_target
from tests.schedules.agreement import assert_pair_agrees, build_pair, symbols_of
from tests.schedules.kernel_cases import host, prim_func

NARROW = '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}'
# Kernel, strides, steps, padding before and after, of each axis.
SAME = Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
HALVED = Geometry((3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
UNEVEN = Geometry((2, 5), (1, 3), (3, 2), (0, 4), (2, 1))
BARE = Geometry((3, 3), (1, 2), (1, 1), (0, 0), (0, 0))
LINE = Geometry((5,), (2,), (1,), (2,), (2,))
WIDE_LINE = Geometry((3,), (1,), (4,), (4,), (4,))
VOLUME = Geometry((1, 3, 2), (1, 2, 1), (1, 1, 1), (0, 1, 1), (0, 1, 0))


def tensor(geometry: Geometry, channels: int, sizes: tuple[int, ...] | None) -> te.Tensor:
    axes = sizes or [te.var(name, "int64") for name in "hwd"[: len(geometry.kernel)]]
    return te.placeholder((2, *axes, channels), "float32", name="x")


def convolved(geometry: Geometry, channels: int, filters: int, groups: int, sizes=None) -> tirx.PrimFunc:
    x = tensor(geometry, channels, sizes)
    window = math.prod(geometry.kernel)
    width = filters_width(None, filters, groups, "float32", cpu_limits(host().target))
    packed = te.placeholder((-(-filters // width), window * channels // groups, width), "float32", name="packed")
    bias = te.placeholder((filters,), "float32", name="bias")
    product = convolution(geometry, filters, groups)(x, packed)
    biased = te.compute(product.shape, lambda *i: te.max(product(*i) + bias(i[-1]), 0.0), name="biased")
    return prim_func([x, packed, bias, biased])


def depthwise(geometry: Geometry, channels: int, sizes=None) -> tirx.PrimFunc:
    x = tensor(geometry, channels, sizes)
    weight = te.placeholder((math.prod(geometry.kernel), channels), "float32", name="weight")
    return prim_func([x, weight, depthwise_convolution(geometry)(x, weight)])


def pooled(geometry: Geometry, channels: int, kind: str, sizes=None) -> tirx.PrimFunc:
    x = tensor(geometry, channels, sizes)
    pool = {"max": largest(geometry), "mean": mean(geometry, False), "padded mean": mean(geometry, True)}[kind]
    return prim_func([x, pool(x)])


POINT = Geometry((1, 1), (1, 1), (1, 1), (0, 0), (0, 0))
CASES = {
    "points": lambda: convolved(POINT, 24, 40, 1),
    "points, known sizes": lambda: convolved(POINT, 5, 96, 1, (9, 11)),
    "points of a wide weight": lambda: convolved(POINT, 1024, 1024, 1, (2, 3)),
    "3 x 3": lambda: convolved(SAME, 5, 40, 1),
    "3 x 3, known sizes": lambda: convolved(SAME, 16, 33, 1, (13, 17)),
    "3 x 3 in steps of 2": lambda: convolved(HALVED, 3, 16, 1),
    "uneven": lambda: convolved(UNEVEN, 4, 24, 1),
    "uneven, known sizes": lambda: convolved(UNEVEN, 4, 7, 1, (9, 30)),
    "no padding": lambda: convolved(BARE, 6, 64, 1),
    "no padding, known sizes": lambda: convolved(BARE, 6, 1, 1, (7, 41)),
    "groups": lambda: convolved(HALVED, 24, 48, 3),
    "groups of few filters": lambda: convolved(SAME, 6, 18, 3),
    "a line": lambda: convolved(LINE, 7, 20, 1),
    "a line, known size": lambda: convolved(LINE, 1, 20, 1, (300,)),
    "a line with gaps": lambda: convolved(WIDE_LINE, 8, 16, 2),
    "a volume": lambda: convolved(VOLUME, 3, 16, 1),
    "depthwise": lambda: depthwise(SAME, 40),
    "depthwise in steps of 2": lambda: depthwise(HALVED, 16),
    "depthwise, known sizes": lambda: depthwise(UNEVEN, 100, (11, 40)),
    "depthwise, few channels": lambda: depthwise(SAME, 3),
    "depthwise line": lambda: depthwise(LINE, 33),
    "max": lambda: pooled(HALVED, 20, "max"),
    "max, known sizes": lambda: pooled(BARE, 64, "max", (15, 15)),
    "mean": lambda: pooled(HALVED, 20, "mean"),
    "padded mean": lambda: pooled(SAME, 20, "padded mean", (9, 9)),
}
SIZES = ((7, 9, 5), (16, 14, 3), (13, 33, 9), (9, 61, 4))


@pytest.mark.parametrize("narrow", [False, True], ids=["host", "avx2"])
@pytest.mark.parametrize("name", CASES)
def test_windows_agree_with_themselves_unscheduled(name: str, narrow: bool) -> None:
    func = CASES[name]()
    pair = build_pair(func, resolve_target(NARROW).target if narrow else host().target)
    assert pair.rule == "cpu-any-size-windows"
    for sizes in SIZES if symbols_of(func) else SIZES[:1]:
        assert_pair_agrees(pair, dict(zip("hwd", sizes, strict=True)))
