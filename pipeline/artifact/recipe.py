"""The lowered graph as hashes: the recipe by which an artifact takes other weights.

Packing, turning, folding and quantisation of weights are passes; the manifest has the options that they ran with. Run
again on a graph with other weights they make the same code, or what is another has a name: a kernel, or a constant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tvm_ffi

from relaxtune.models.spec import shape_text
from relaxtune.pipeline.artifact.entries import RecipeEntry
from relaxtune.pipeline.passes.kit.ir import array_of, bindings_of, constants_in, main_of
from relaxtune.pipeline.passes.module import LoweredModule

_DIGITS = 16
_SHOWN = 5


@dataclass(frozen=True)
class Obstacle:
    """Why other weights do not fit: what is another, and the ONNX nodes and initialisers that it is made of."""

    what: str
    nodes: tuple[str, ...] = ()
    initialisers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the obstacle as part of a sentence."""
        places = [
            f"{kind} {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
            for kind, names in (("ONNX nodes", self.nodes), ("initialisers", self.initialisers))
            if names
        ]
        return f"{self.what} ({'; '.join(places)})" if places else self.what


def recipe_of(lowered: LoweredModule) -> RecipeEntry:
    """Return the hashes of a lowered module. They hold for one version of TVM, as hashes of kernels do."""
    kernels = {name: _structure(lowered.mod[name]) for name in lowered.kernels}
    constants = {
        place: f"{array.dtype} {list(array.shape)} "
        + hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:_DIGITS]
        for place, _, array in _embedded(lowered)
    }
    return RecipeEntry(_structure(main_of(lowered.mod)), kernels, constants)


def find_obstacles(recipe: RecipeEntry, lowered: LoweredModule) -> list[Obstacle]:
    """Return what of a module, lowered with other weights, is not as an artifact's code has it; none where it fits."""
    again = recipe_of(lowered)
    nodes = {name: tuple(node for call in calls for node in call.onnx_nodes) for name, calls in lowered.kernels.items()}
    found = [
        Obstacle(f"kernel {name} is not in the artifact", nodes[name], _initialisers(lowered, nodes[name]))
        for name in again.kernels.keys() - recipe.kernels.keys()
    ]
    found += [
        Obstacle(f"kernel {name} of the artifact is not made") for name in recipe.kernels.keys() - again.kernels.keys()
    ]
    found += [
        Obstacle(f"kernel {name} is made otherwise", nodes[name], _initialisers(lowered, nodes[name]))
        for name in recipe.kernels.keys() & again.kernels.keys()
        if recipe.kernels[name] != again.kernels[name]
    ]
    if not found and recipe.main != again.main:
        found.append(Obstacle("the same kernels are called otherwise"))
    calls = {call.binding: call.onnx_nodes for of in lowered.kernels.values() for call in of}
    for place, binding, _ in _embedded(lowered):
        if not found and recipe.constants.get(place) != again.constants[place]:
            of = calls.get(binding, ())
            found.append(Obstacle(f"constant {place} is part of the code", of, _initialisers(lowered, of)))
    return sorted(found, key=str)


def _embedded(lowered: LoweredModule) -> Iterator[tuple[str, str, np.ndarray]]:
    """Give each constant that `main` holds: its place, the variable that reads it, its values."""
    for binding in bindings_of(main_of(lowered.mod)):
        for number, constant in enumerate(constants_in(binding.value)):
            yield f"{binding.var.name}.{number}", binding.var.name, array_of(constant)


def _initialisers(lowered: LoweredModule, nodes: tuple[str, ...]) -> tuple[str, ...]:
    graph = lowered.graph.model.proto.graph
    known = {tensor.name: f"{tensor.name}[{shape_text(tensor.dims)}]" for tensor in graph.initializer}
    read = (known[name] for node in graph.node if node.name in nodes for name in node.input if name in known)
    return tuple(dict.fromkeys(read))


def _structure(function: object) -> str:
    number = int(tvm_ffi.structural_hash(function, map_free_vars=True, skip_tensor_content=True))
    return f"{number % 2**64:016x}"
