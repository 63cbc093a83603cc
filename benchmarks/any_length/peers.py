"""The peers of an artifact that runs at any sizes: the float32 reference, torch's arms and ONNX Runtime's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.any_length.random_sizes import Arm
from benchmarks.gpu_arms import torch_models
from benchmarks.gpu_arms.cases import Case, weights_of
from benchmarks.gpu_arms.torch_arms import graph_arm
from relaxtune.models import load_model, save_model
from relaxtune.models.zoo.presets import get_preset

_MODES = {"torch": None, "torch_graphs": "reduce-overhead"}


class Peers:
    """The modules and sessions of one model, which take calls of all sizes.

    Attributes
    ----------
    model
        The zoo's graph in float16.
    notes
        Why an arm that was asked for is missing.
    """

    def __init__(self, model: str, arms: Sequence[str]) -> None:
        """Build the modules and sessions that are asked for.

        Raises
        ------
        ValueError
            The benchmark has no torch module of the model.
        """
        self.notes: dict[str, str] = {}
        torch.set_grad_enabled(False)
        torch._dynamo.config.recompile_limit = 64
        # Torch would take a batch for a number of heads where they are equal in the first call, and compile once more.
        torch.fx.experimental._config.use_duck_shape = False
        shapes = {spec.name: spec.shape for spec in get_preset(model).inputs}
        self.model = load_model(f"{model}:fp16", shapes=shapes)
        weights = weights_of(load_model(model, shapes=shapes).proto)

        def built(dtype: torch.dtype) -> nn.Module:
            return torch_models.build(Case(model, 1), weights, {}, device="cuda", dtype=dtype, masked=True)

        self._exact = built(torch.float32)
        half = built(torch.float16) if {*_MODES, "torch_eager"} & set(arms) else None
        self._compiled = {
            name: torch.compile(half, dynamic=True, mode=mode) for name, mode in _MODES.items() if name in arms
        }
        self._eager = half if "torch_eager" in arms else None
        self._session = self._ort() if "ort" in arms else None

    def expected(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Return the outputs in float32; memory that torch holds and does not use is free for the other arms then."""
        wide = [tensor.float() if tensor.is_floating_point() else tensor for tensor in self._on_device(feeds)]
        outputs: dict[str, Tensor] = self._exact(*wide)
        del wide
        torch.cuda.empty_cache()
        return outputs

    def compile_at(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Call each module that torch compiles once."""
        tensors = self._on_device(feeds)
        for module in self._compiled.values():
            module(*tensors)
            torch.cuda.synchronize()
        del tensors
        torch.cuda.empty_cache()

    def arms(self, feeds: Mapping[str, np.ndarray], *, checks: bool) -> dict[str, Arm]:
        """Return a call of each peer, its inputs on the device; `checks` asks for outputs of the first one."""
        ort = {} if self._session is None else {"ort": self._ort_arm(self._session, feeds, checks=checks)}
        return {**self.torch_arms(feeds), **ort}

    def torch_arms(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Arm]:
        """Return a call of each module."""
        tensors = self._on_device(feeds)

        def arm(module: nn.Module) -> Arm:
            def run() -> Any:
                outputs = module(*tensors)
                torch.cuda.synchronize()
                return outputs

            return run

        arms = {name: arm(module) for name, module in self._compiled.items()}
        if self._eager is not None:
            captured, checked = graph_arm(self._eager, tensors), list[bool]()

            def replay() -> Any:
                captured.launch()
                captured.synchronise()
                # Copies of the outputs, the first time.
                outputs = captured.outputs() if not checked else {}
                checked.append(True)
                return outputs

            arms["torch_eager"] = replay
        return arms

    def _on_device(self, feeds: Mapping[str, np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(feeds[spec.name]).cuda() for spec in self.model.inputs]

    def _ort(self) -> Any:
        import onnxruntime

        provider = "CUDAExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            self.notes["ort"] = f"onnxruntime {onnxruntime.__version__} has no {provider}"
            return None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        with tempfile.TemporaryDirectory() as folder:
            path = save_model(self.model, Path(folder, "model.onnx"))
            session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
        return session if provider in session.get_providers() else None

    @staticmethod
    def _ort_arm(session: Any, feeds: Mapping[str, np.ndarray], *, checks: bool) -> Arm:
        """Return a call with inputs and outputs on the device; the first one copies them to the host if it `checks`."""
        import onnxruntime

        binding = session.io_binding()
        held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for name, array in feeds.items()}
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for value in session.get_outputs():
            binding.bind_output(value.name, "cuda", 0)

        def run() -> Any:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            arrays = binding.copy_outputs_to_cpu() if not checked else ()
            checked.append(held)
            return {one.name: array for one, array in zip(session.get_outputs(), arrays, strict=False)}

        checked: list[object] = [] if checks else [held]
        return run
