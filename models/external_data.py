"""Weights kept outside the `.onnx` file: where they may lie, how large they must be, and how they are read.

Nothing is read before every tensor's place and size was checked, so a hostile file can neither reach outside its folder
nor ask for more memory than the bytes that are really there.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from relaxtune.models.errors import ExternalDataError
from relaxtune.models.files import LFS_POINTER_BYTES, is_lfs_pointer
from relaxtune.models.onnx_model import (
    PROTOBUF_LIMIT_BYTES,
    element_type_name,
    is_numeric,
    list_graphs,
    read_in,
    tensor_bytes,
)

# Shape inference reads small constants (shapes, axes): they are always inline.
_ALWAYS_INLINE_BYTES = 1024
# Protobuf copies a payload whenever it is read; a larger one stays in its file, where the model fits protobuf too.
LARGE_BYTES = 2**20
# Tables of positions are read for what they say about sizes.
_INDICES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of the model whose payload is external: initializers, attributes, subgraphs, functions."""
    for tensor in (*model.graph.initializer, *_inner_tensors(model)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def check_external_data(model: onnx.ModelProto, folder: Path) -> int:
    """Check the place and size of every external tensor and return how many bytes they are together.

    Raises `ExternalDataError`: a path is absolute, escapes the folder (by `..`, or a link to elsewhere than the blobs
    of the hub's cache) or is not a file; or the bytes are not what dtype and dims ask for.
    """
    return sum(_check_tensor(tensor, folder) for tensor in external_tensors(model))


def inline_external_data(model: onnx.ModelProto, folder: Path, total_bytes: int) -> bool:
    """Read checked external tensors into the model, but for large weights; above protobuf's limit only the small ones.

    Returns whether every tensor is inline now; if not, large initializers of the main graph still refer to `folder`.
    """
    crosses = total_bytes >= PROTOBUF_LIMIT_BYTES
    kept = False
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            size = tensor_bytes(tensor)
            if size > (_ALWAYS_INLINE_BYTES if crosses else LARGE_BYTES) and tensor.data_type not in _INDICES:
                kept = True
            else:
                read_in(tensor, folder)
    for tensor in _inner_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            read_in(tensor, folder)
    return not kept


def _check_tensor(tensor: onnx.TensorProto, folder: Path) -> int:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    what = f"external data of tensor {tensor.name!r}"
    if not is_numeric(tensor.data_type) or any(dim < 0 for dim in tensor.dims):
        dtype = element_type_name(tensor.data_type)
        msg = f"{what} has dtype {dtype} and dims {list(tensor.dims)}; expected numbers and dims of 0 or more"
        raise ExternalDataError(msg)
    path = _checked_path(entries.get("location", ""), folder, what)
    if path.stat().st_size < LFS_POINTER_BYTES and is_lfs_pointer(path):
        raise ExternalDataError(f"{what}: {path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    offset = _entry_number(entries, "offset", what) or 0
    length = _entry_number(entries, "length", what)
    expected, available = tensor_bytes(tensor), path.stat().st_size - offset
    described = f"{onnx.TensorProto.DataType.Name(tensor.data_type)} {list(tensor.dims)}"
    if length is not None and length != expected:
        msg = f"{what} says it is {length} bytes, but {described} takes {expected}; export the model again"
        raise ExternalDataError(msg)
    if available < expected:
        raise ExternalDataError(
            f"{what} in {path} is truncated: {described} takes {expected} bytes from offset {offset}, "
            f"the file has {max(available, 0)} there; copy the file again"
        )
    if length is None and available != expected:
        raise ExternalDataError(
            f"{what} in {path} is larger than the tensor: {described} takes {expected} bytes, "
            f"the file has {available} from offset {offset} and no length is given; export the model again"
        )
    return expected


def _checked_path(location: str, folder: Path, what: str) -> Path:
    fix = "external data must lie in the model's folder; move it there and export again with a relative location"
    if not location or "\0" in location:
        raise ExternalDataError(f"{what} has no location; {fix}")
    if PurePosixPath(location).is_absolute() or PureWindowsPath(location).anchor:
        raise ExternalDataError(f"{what} has the absolute path {location!r}; {fix}")
    if ".." in PurePosixPath(location).parts or ".." in PureWindowsPath(location).parts:
        raise ExternalDataError(f"{what} escapes the model's folder with {location!r}; {fix}")
    path, root = folder / location, folder.resolve()
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError) as e:
        raise ExternalDataError(f"{what} is missing: {path} ({e}); copy the file beside the model") from e
    blobs = _hub_blobs(folder)
    if not target.is_relative_to(root) and (blobs is None or target.parent != blobs):
        msg = f"{what} escapes the model's folder: {path} is a link to {target}; copy the file itself (cp -L)"
        raise ExternalDataError(msg)
    if not stat.S_ISREG(mode):
        raise ExternalDataError(f"{what} is not a regular file: {path}; {fix}")
    return path


def _hub_blobs(folder: Path) -> Path | None:
    """Return where the hub's cache keeps the files that a folder of a snapshot links to; None for other folders."""
    snapshots = next((one for one in folder.absolute().parents if one.name == "snapshots"), None)
    return None if snapshots is None else (snapshots.parent / "blobs").resolve()


def _entry_number(entries: dict[str, str], key: str, what: str) -> int | None:
    if key not in entries:
        return None
    text = entries[key]
    if not (text.isascii() and text.isdecimal()):
        raise ExternalDataError(f"{what} has the {key} {text!r}; expected a number of 0 or more")
    return int(text)


def _inner_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor but the initializers of the main graph."""
    for owner in (model.graph, *model.functions):
        for number, graph in enumerate(list_graphs(owner)):
            if isinstance(graph, onnx.GraphProto):
                yield from graph.initializer if number else ()
                for sparse in graph.sparse_initializer:
                    yield from (sparse.values, sparse.indices)
            for attribute in (attribute for node in graph.node for attribute in node.attribute):
                yield from (attribute.t,) if attribute.HasField("t") else ()
                yield from attribute.tensors
