"""`relaxtune.load`: an artifact as a module. It needs TVM's runtime, not its compiler, and no ONNX."""

from __future__ import annotations

from pathlib import Path

from relaxtune.pipeline.artifact.module import Module


def load(
    directory: str | Path,
    *,
    device: str | None = None,
    threads: int | None = None,
    verify_key: str | Path | None = None,
) -> Module:
    """Return an artifact as a module; `run` takes and returns NumPy arrays by name.

    Loading runs the artifact's code: load only what you trust. With `verify_key`, the public key of who must have
    signed it, a missing or wrong signature is an `ArtifactError`. See `Module.load` for `device` and `threads`.
    """
    return Module.load(directory, device=device, threads=threads, verify_key=verify_key)
