"""Names of exports, for what makes them and for what only reads them (without torch)."""

from __future__ import annotations

_DEFAULT_OPSETS = {"dynamo": 18, "torchscript": 17}


def default_opset(exporter: str) -> int:
    """Return the version of the operators that an exporter writes unless told otherwise."""
    return _DEFAULT_OPSETS[exporter]


def export_name(family: str, exporter: str, opset: int | None = None, dtype: str = "", *, dynamic: bool = False) -> str:
    """Return the name of an export: family, exporter, and whatever is not the default."""
    version = f"op{opset}" if opset not in (None, default_opset(exporter)) else ""
    return "-".join(part for part in (family, exporter, version, dtype, "dynamic" if dynamic else "") if part)
