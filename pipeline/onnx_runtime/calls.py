"""Calls of a session for timing: inputs lie where it computes, and a call returns when the outputs are there.

It imports NumPy and ONNX Runtime alone: a peer may run under another interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime

Outputs = Mapping[str, np.ndarray]


def host_call(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> tuple[Callable[[], None], Callable[[], Outputs]]:
    """Return a call on the CPU, and what gives the outputs of the last one by name."""
    last: dict[str, Sequence[np.ndarray]] = {}
    wanted, given = list(names), dict(feeds)

    def run() -> None:
        last["outputs"] = session.run(wanted, given)

    return run, lambda: dict(zip(wanted, last["outputs"], strict=True))


def device_call(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, np.ndarray], kind: str
) -> tuple[Callable[[], None], Callable[[], Outputs]]:
    """Return a call whose inputs and outputs stay on a device of a kind (`cuda`), and what gives the outputs."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, kind, 0))
    for name in names:
        binding.bind_output(name, kind, 0)
    # It returns when the outputs are there.
    return (
        lambda: session.run_with_iobinding(binding),
        lambda: dict(zip(names, binding.copy_outputs_to_cpu(), strict=True)),
    )
