"""What the matrix of exports is made of: the exports, and for each the ways in which it is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from tests.export.names import EXPORTERS, export_name

# As exported with numbers; as exported with names; the export with names, given numbers when it is imported.
STATIC, SYMBOLIC, PINNED = "static", "symbolic", "pinned"
# TorchScript's converter ends at opset 20 and dynamo's begins at 18 (torch 2.13).
OPSETS = {"torchscript": (11, 12, 13, 14, 15, 16, 18, 19, 20), "dynamo": (19, 20, 21, 22, 23, 24, 25)}
OPSET_FAMILIES = ("bert", "gpt2", "llama", "t5", "vit")
HALF_FAMILIES = ("bert", "gpt2", "llama", "llama-decode", "gemma2", "t5-encoder", "vit", "whisper", "deberta-v2")


@dataclass(frozen=True)
class Export:
    """One file that an exporter writes; see `make_exports.export`."""

    family: str
    exporter: str
    dynamic: bool = False
    opset: int | None = None
    dtype: str = ""

    @property
    def name(self) -> str:
        """Return the file's stem."""
        return export_name(self.family, self.exporter, self.opset, self.dtype, dynamic=self.dynamic)


@dataclass(frozen=True)
class Cell:
    """One way of compiling an export: its axes as STATIC, SYMBOLIC or PINNED, and a precision (empty: its own)."""

    export: Export
    axes: str
    precision: str = ""

    @property
    def key(self) -> str:
        """Return the name by which a finished cell is found again."""
        return f"{self.export.name}/{self.axes}/{self.precision or 'own'}"


def list_cells(families: tuple[str, ...], precisions: tuple[str, ...], *, sweeps: bool = True) -> list[Cell]:
    """Return the cells of some families; `precisions` beside each graph's own are for static and symbolic axes."""
    cells = []
    for export in list_exports(families, sweeps=sweeps):
        plain = export.opset is None and not export.dtype
        for axes in (SYMBOLIC, PINNED) if export.dynamic else (STATIC,):
            cells.append(Cell(export, axes))
            if plain and axes != PINNED:
                cells += [Cell(export, axes, precision) for precision in precisions]
    return cells


def list_exports(families: tuple[str, ...], *, sweeps: bool = True) -> list[Export]:
    """Return every export of some families; with `sweeps`, those in half precision and of other opsets too."""
    exports = []
    for family in families:
        for exporter in EXPORTERS:
            # Optimum's names are those of a decoder with caches, which always grow.
            if exporter == "optimum" and not family.endswith("-decode"):
                continue
            forms = (True,) if exporter == "optimum" else (False, True)
            exports += [Export(family, exporter, dynamic) for dynamic in forms]
            if sweeps and exporter in OPSETS and family in HALF_FAMILIES:
                exports.append(Export(family, exporter, dtype="float16"))
            if sweeps and exporter in OPSETS and family in OPSET_FAMILIES:
                exports += [Export(family, exporter, True, opset) for opset in OPSETS[exporter]]
    return exports
