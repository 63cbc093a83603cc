"""PyTorch beside ours: a module that the user names, as it is (`torch`) or through `torch.compile`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from relaxtune.pipeline.bench.peers.callers import Caller, PeerError, PeerOrder


class TorchPeer:
    """The module of a factory, in evaluation mode, on the artifact's device."""

    def __init__(self, order: PeerOrder) -> None:
        """Make the module.

        Raises `ImportError`: this torch does not compute on the device; `PeerError`: the factory cannot be had, or
        returns something else.
        """
        if order.kind == "cuda" and not torch.cuda.is_available():
            raise ImportError("torch without CUDA", name="a torch with CUDA")
        torch.set_num_threads(order.threads)
        torch.set_float32_matmul_precision("high" if order.tf32 else "highest")
        module = _factory(order.factory or "")()
        if not isinstance(module, torch.nn.Module):
            raise PeerError(f"{order.factory} returned {type(module).__name__}; expected a torch.nn.Module")
        self._device = "cuda" if order.kind == "cuda" else "cpu"
        self._module, self._order = module.eval().to(self._device), order

    @property
    def version(self) -> str:
        """The library's version."""
        return str(torch.__version__)

    def callers(self, inputs: Mapping[str, np.ndarray], count: int) -> list[Caller]:
        """Return callers, each with a CUDA stream of its own where there are several."""
        call = self._module
        if self._order.peer == "torch-compile":
            # A CUDA graph of inductor's belongs to one thread.
            mode = "max-autotune" if count == 1 else "max-autotune-no-cudagraphs"
            call = torch.compile(self._module, mode=mode, dynamic=False)
        return [self._caller(call, inputs, own_stream=count > 1) for _ in range(count)]

    def generate(self, ids: list[list[int]], new: int) -> tuple[list[float], list[list[int]]]:
        """Return when each of the tokens after some prompts came, and the tokens: static cache in place, compiled."""
        if not hasattr(self._module, "generate"):
            raise PeerError(f"{self._order.factory} returned {type(self._module).__name__}, which has no `generate`")
        prompts = torch.tensor(ids, device=self._device)
        seconds, started = list[float](), time.perf_counter()
        # It gets the prompts first.
        arrivals = SimpleNamespace(put=lambda _: seconds.append(time.perf_counter() - started), end=lambda: None)
        with torch.inference_mode():
            text = self._module.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, min_new_tokens=new,
                max_new_tokens=new, cache_implementation="static", streamer=arrivals, pad_token_id=0,
            )  # fmt: skip
        return seconds[1:], text[:, prompts.shape[1] :].T.tolist()

    def _caller(self, call: Any, inputs: Mapping[str, np.ndarray], *, own_stream: bool) -> Caller:
        tensors = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in inputs.items()}
        taken = inspect.signature(self._module.forward).parameters
        named = all(name in taken for name in tensors) or any(one.kind is one.VAR_KEYWORD for one in taken.values())
        positional, keywords = ([], tensors) if named else (list(tensors.values()), {})
        stream = torch.cuda.Stream() if own_stream and self._device == "cuda" else None
        last: dict[str, Any] = {}

        def run() -> None:
            # Both hold for the thread that sets them.
            with torch.inference_mode(), torch.cuda.stream(stream):
                last["returned"] = call(*positional, **keywords)
                if self._device == "cuda":
                    torch.cuda.current_stream().synchronize()

        return Caller(run, lambda: _arrays(last["returned"], self._order.outputs))


def _factory(reference: str) -> Any:
    """Return the callable of `MODULE:FACTORY` or `FILE.py:FACTORY`.

    Raises `PeerError`: there is no such file, module or name.
    """
    place, _, name = reference.rpartition(":")
    sys.path.insert(0, os.getcwd())
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise PeerError(f"{place} cannot be loaded as Python")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise PeerError(f"{reference}: {error}; expected MODULE:FACTORY or FILE.py:FACTORY") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise PeerError(f"{place} has no function {name!r} that returns the torch.nn.Module")
    return found


def _arrays(returned: Any, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return what a module returned by the names of the graph's outputs: by key where it has them, else in order."""
    if isinstance(returned, Mapping) and all(name in returned for name in names):
        tensors = [returned[name] for name in names]
    else:
        values = list(returned.values()) if isinstance(returned, Mapping) else returned
        tensors = [values] if isinstance(values, torch.Tensor) else list(values)
        if len(tensors) != len(names):
            raise PeerError(f"the module returned {len(tensors)} values, the graph has {', '.join(names)}")
    bad = next((one for one in tensors if not isinstance(one, torch.Tensor)), None)
    if bad is not None:
        raise PeerError(f"the module returned a {type(bad).__name__} where the graph has a tensor; wrap it")
    # NumPy has no bfloat16.
    plain = [one.float() if one.dtype is torch.bfloat16 else one for one in tensors]
    return {name: one.cpu().numpy() for name, one in zip(names, plain, strict=True)}
