"""The steps of a recurrent layer on a GPU, against the same on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.functions.recurrence import Recurrence, recurrence_function

STEPS, BATCH = 5, 3
LAYERS = [
    Recurrence("LSTM", 32, (False, True)),
    Recurrence("GRU", 24, (True,)),
    Recurrence("RNN", 7, (False,), rectified=True),
]


def _inputs(layer: Recurrence) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    directions, columns = len(layer.reversed), layer.gates * layer.lanes
    shapes = [
        (STEPS, BATCH, directions * layer.tiles * columns),
        (directions, layer.tiles, layer.hidden, columns),
        (directions, layer.tiles, columns),
    ]
    state = rng.standard_normal((2, directions, BATCH, layer.hidden), dtype=np.float32)
    lengths = np.array([STEPS, 0, 3], "int32")
    return [*(0.3 * rng.standard_normal(one, dtype=np.float32) for one in shapes), lengths, *state]


def _run(layer: Recurrence, target: tvm.target.Target, device: tvm.runtime.Device) -> list[np.ndarray]:
    func = recurrence_function(layer).with_attr("global_symbol", "main")
    built = tvm.compile(apply_fallback(tvm.IRModule({"main": func}), target), target=target)
    state = (len(layer.reversed), BATCH, layer.hidden)
    results = [np.full(shape, np.nan, "float32") for shape in ((STEPS, *state), state, state)]
    tensors = [tvm.runtime.tensor(one, device) for one in (*_inputs(layer), *results)]
    built["main"](*tensors)
    return [one.numpy() for one in tensors[-3:]]


def test_a_sequence_without_steps_gives_the_state_it_began_with() -> None:
    layer = LAYERS[0]
    y, *last = _run(layer, tvm.target.Target("llvm"), tvm.cpu())
    for got, first in zip(last, _inputs(layer)[-2:], strict=True):
        np.testing.assert_array_equal(got[:, 1], first[:, 1])
    assert not y[:, :, 1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.kind)
def test_kernels_of_steps_agree_with_the_loops(layer: Recurrence) -> None:
    here = _run(layer, tvm.target.Target("llvm"), tvm.cpu())
    there = _run(layer, tvm.target.Target.from_device(tvm.cuda()), tvm.cuda())
    for got, want in zip(there, here, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
