"""An artifact as a model that ONNX Runtime runs, with the execution provider that runs it.

::

    OUT/model_ctx.onnx                    one EPContext node, with the artifact's inputs and outputs
        artifact/                         a copy of the artifact, which the node names
        librelaxtune_onnxruntime.so       the provider; beside it the runtimes of artifacts and of TVM

The provider is `pipeline/artifact/cpp/onnxruntime/provider.cc`. It is compiled once for each version of its sources
and of TVM, and kept in the folder for caches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from relaxtune.models.spec import TensorSpec, numpy_dtype
from relaxtune.pipeline.artifact.directory import copy_artifact, load_manifest
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.errors import ArtifactError, PipelineError
from relaxtune.pipeline.temporary import cache_folder, locked_folder
from relaxtune.pipeline.workers.linking import run_compiler
from relaxtune.schedules.libraries.vendors import named_libraries

MODEL_FILE = "model_ctx.onnx"
LIBRARY_FILE = "librelaxtune_onnxruntime.so"
#: The name of the provider in ONNX Runtime, and the `source` of its EPContext nodes.
PROVIDER = "relaxtune"

_ARTIFACT_FOLDER = "artifact"
_SOURCES = Path(__file__).parent / "cpp"
# ONNX Runtime 1.23, the first that loads the provider, reads models up to this version of the format.
_IR_VERSION = 10


@dataclass(frozen=True)
class ProviderExport:
    """Where a model for ONNX Runtime and its provider are."""

    model: Path
    library: Path

    @property
    def python(self) -> str:
        """The lines of Python that open a session."""
        return f"""\
import onnxruntime as ort
ort.register_execution_provider_library("{PROVIDER}", "{self.library}")
options = ort.SessionOptions()
options.add_provider_for_devices([one for one in ort.get_ep_devices() if one.ep_name == "{PROVIDER}"], {{}})
session = ort.InferenceSession("{self.model}", options)
"""


def export_for_onnx_runtime(directory: Path, out: Path) -> ProviderExport:
    """Write an artifact as a model of ONNX Runtime, and the provider beside it, in place of an earlier export.

    Raises `ArtifactError`: the artifact is missing or damaged, or the C++ runtime cannot run it; `PipelineError`: the
    provider cannot be compiled, or `out` cannot be written.
    """
    manifest = load_manifest(directory)
    if manifest.generation is not None:
        raise ArtifactError(
            f"{directory} generates tokens, which the provider does not; use `relaxtune generate`, or compile the "
            "decoder without --generate"
        )
    if libraries := named_libraries(manifest.target.libraries):
        names = ", ".join(library.title for library in libraries)
        raise ArtifactError(
            f"{directory} calls {names}, and the C++ runtime does not; compile it without --routes library"
        )
    provider = _provider()
    try:
        out.mkdir(parents=True, exist_ok=True)
        copy_artifact(directory, out / _ARTIFACT_FOLDER)
        for library in (*provider.iterdir(), *_runtimes()):
            _replace(out / library.name, partial(_link, library))
        model = _model(manifest).SerializeToString()
        _replace(out / MODEL_FILE, lambda staged: staged.write_bytes(model))
    except OSError as e:
        raise PipelineError(f"{out} cannot be written: {e}; name another folder") from e
    return ProviderExport(out / MODEL_FILE, out / LIBRARY_FILE)


def _replace(place: Path, write: Callable[[Path], object]) -> None:
    """Write a file that a process may have opened: that process keeps the old one."""
    staged = place.with_name(f".{place.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    write(staged)
    staged.replace(place)


def _link(source: Path, place: Path) -> None:
    """Give a library a second name, or copy it to another file system.

    A process may load both the provider and Python's TVM. TVM's library must then be one file: two copies register
    their types twice and end the process.
    """
    try:
        place.hardlink_to(source)
    except OSError:
        shutil.copy(source, place)


def _model(manifest: Manifest) -> onnx.ModelProto:
    """Return the model: one node that stands for the artifact."""

    def declared(specs: Sequence[TensorSpec]) -> list[onnx.ValueInfoProto]:
        return [
            onnx.helper.make_tensor_value_info(
                spec.name, onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(spec.dtype)), spec.shape
            )
            for spec in specs
        ]

    node = onnx.helper.make_node(
        "EPContext",
        [spec.name for spec in manifest.inputs],
        [spec.name for spec in manifest.outputs],
        domain="com.microsoft",
        name=manifest.model,
        main_context=1,
        embed_mode=0,
        ep_cache_context=_ARTIFACT_FOLDER,
        source=PROVIDER,
    )
    graph = onnx.helper.make_graph([node], manifest.model, declared(manifest.inputs), declared(manifest.outputs))
    opset = onnx.helper.make_opsetid("com.microsoft", 1)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name=PROVIDER)


def _provider() -> Path:
    """Return the folder of the compiled provider and the C++ runtime.

    Raises `PipelineError`: they cannot be compiled.
    """
    sources = sorted(path for path in _SOURCES.rglob("*") if path.suffix in (".cc", ".h", ".map", ".txt"))
    versions = [importlib.metadata.version(package).encode() for package in ("apache-tvm", "apache-tvm-ffi")]
    content = b"\0".join((*(path.read_bytes() for path in sources), *versions))
    kept = cache_folder("onnxruntime")
    kept.mkdir(parents=True, exist_ok=True)
    compiled = kept / hashlib.sha256(content).hexdigest()[:16]
    if compiled.is_dir():
        return compiled
    if shutil.which("cmake") is None:
        raise PipelineError(
            "the provider is compiled here, and cmake is missing; install cmake and g++, then export again"
        )
    with locked_folder(kept, "building-") as folder:
        build, made = folder / "build", folder / "made"
        wheels = [f"-D{name.upper()}_WHEEL={_wheel(name)}" for name in ("tvm", "tvm_ffi")]
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DRELAXTUNE_EXAMPLE=OFF"]
        for command in (
            ["cmake", "-S", str(_SOURCES), "-B", str(build), *options, *wheels],
            ["cmake", "--build", str(build)],
        ):
            done = run_compiler(command, folder)
            if done.returncode != 0:
                raise PipelineError(
                    f"the provider for ONNX Runtime cannot be compiled; the end of `{' '.join(command[:2])}`: "
                    f"{(done.stdout + done.stderr)[-2000:]}\nIt needs cmake 3.18 or later and g++ with C++17"
                )
        made.mkdir()
        for library in build.glob("*.so"):
            library.rename(made / library.name)
        with suppress(OSError):  # another process was first
            made.rename(compiled)
    return compiled


def _runtimes() -> list[Path]:
    """Return TVM's runtime libraries; some wheels have none for CUDA."""
    tvm, ffi = _wheel("tvm") / "lib", _wheel("tvm_ffi") / "lib"
    found = (tvm / "libtvm_runtime.so", ffi / "libtvm_ffi.so", tvm / "libtvm_runtime_cuda.so")
    return [library for library in found if library.exists()]


def _wheel(name: str) -> Path:
    found = importlib.util.find_spec(name)
    return Path(str(found and found.origin)).parent
