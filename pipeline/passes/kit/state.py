"""`LoweringState`: what the passes of one `lower` share besides the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace

import numpy as np
import tvm

from relaxtune.models.unpadding import EXTRA_INPUTS, Unpadding
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.precision.calibration import StaticScales

# Fields that no pass changes, and notes, which stay in the report of a failed pass.
_NOT_SAVED = ("graph", "target", "options", "notes", "_order")


@dataclass
class LoweringState:
    """The request, and the facts that passes hand to later ones."""

    graph: ImportedGraph
    target: tvm.target.Target
    options: LoweringOptions
    # Binding name -> ONNX nodes it computes. `name_bindings` fills it with names no pass can generate, so a name that
    # is missing here was made by a pass and has no node of its own.
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # Of the running pass, for its report.
    constants_folded: int = 0  # Constants that the running pass made out of bindings.
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # Parameter name -> array, filled by `lift_weights`.
    # Bindings that multiply the rounded factors of a gated activation by a PrimFunc; the precision pass makes them.
    gate_products: set[str] = field(default_factory=set)
    # Names of the ONNX matmuls that `quantise_weights` has quantised, or `integer_matmuls` has turned into integers.
    quantised_nodes: set[str] = field(default_factory=set)
    float_nodes: set[str] = field(default_factory=set)  # Names of those that precision int8 leaves in floats.
    float_reasons: dict[str, str] = field(default_factory=dict)  # Why, by their names, where a reason is known.
    # ONNX tensors that matmuls read in float8 with a scale of the calibration record.
    static_tensors: set[str] = field(default_factory=set)
    # Whether precision int8 finds a graph of floats, whose matmuls `quantise_weights` then quantises.
    rows_to_bytes: bool = False
    # Bindings of constants alone that are to be computed at run time: packed weights are smaller than unpacked ones.
    unfolded: set[str] = field(default_factory=set)
    tf32: bool = False  # Whether the operands of float32 matmuls were rounded to tf32.
    unpadding: Unpadding | None = None
    _order: dict[str, int] = field(default_factory=dict)

    @property
    def input_count(self) -> int:
        """How many of the parameters of `main` are inputs; weights follow."""
        return len(self.graph.inputs) + (0 if self.unpadding is None else EXTRA_INPUTS)

    @property
    def launches_cost(self) -> bool:
        """Whether fewer kernels are better kernels: on a GPU, where a launch takes as long as a small kernel."""
        return bool(self.target.kind.name == "cuda")

    def nodes_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the ONNX nodes behind bindings, each once, in the order of the graph."""
        if not self._order:
            nodes = (node for found in self.graph.source_map.values() for node in found)
            self._order.update((node, index) for index, node in enumerate(dict.fromkeys(nodes)))
        return tuple(sorted({n for name in names for n in self.sources.get(name, ())}, key=self._order.__getitem__))

    def static_scales(self) -> StaticScales | None:
        """Return the scales of the calibration record that matmuls use, None without any."""
        given = self.options.calibration
        if given is None or not self.static_tensors:
            return None
        return replace(given, scales={name: given.scales[name] for name in sorted(self.static_tensors)})

    def note(self, text: str) -> None:
        """Report `text` once with the running pass."""
        if text not in self.notes:
            self.notes.append(text)

    def saved(self) -> dict[str, object]:
        """Return a copy of what passes have told one another, for `restore`."""
        return {field.name: copy(getattr(self, field.name)) for field in fields(self) if field.name not in _NOT_SAVED}

    def restore(self, saved: Mapping[str, object]) -> None:
        """Forget what a pass told that was left out."""
        for name, value in saved.items():
            setattr(self, name, value)
