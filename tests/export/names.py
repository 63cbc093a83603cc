"""Names of exports, for what makes them and for what only reads them (without torch)."""

from __future__ import annotations

# torch.onnx's two, transformers' own without and with its fusions into ONNX Runtime's operators, Optimum's names.
_DEFAULT_OPSETS = {"dynamo": 18, "torchscript": 17, "transformers": 18, "transformers-fused": 18, "optimum": 17}
EXPORTERS = tuple(_DEFAULT_OPSETS)


def default_opset(exporter: str) -> int:
    """Return the version of the operators that an exporter writes unless told otherwise."""
    return _DEFAULT_OPSETS[exporter]


def export_name(family: str, exporter: str, opset: int | None = None, dtype: str = "", *, dynamic: bool = False) -> str:
    """Return the name of an export: family, exporter, and whatever is not the default."""
    version = f"op{opset}" if opset not in (None, default_opset(exporter)) else ""
    return "-".join(part for part in (family, exporter, version, dtype, "dynamic" if dynamic else "") if part)


def family_of(name: str) -> str:
    """Return the family of an export's name."""
    parts = name.split("-")
    return "-".join(parts[: next(place for place, part in enumerate(parts) if part in EXPORTERS)])
