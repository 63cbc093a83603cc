"""The child that turns CUDA source into cubins: NVRTC compiles one source at a time in a process."""

from __future__ import annotations

from collections.abc import Callable

from relaxtune.pipeline.codegen.cuda_compiler import CubinRequest


def start() -> Callable[[object], bytes]:
    """Return the function that compiles a `CubinRequest`."""

    def compile_request(request: object) -> bytes:
        if not isinstance(request, CubinRequest):
            raise TypeError(f"expected a CubinRequest, got {type(request).__name__}")
        return request.compile()

    return compile_request
