"""Reading and writing `.onnx` files: one protobuf message, with the weights beside it where they do not fit."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from relaxtune.models.errors import ModelFileError
from relaxtune.models.onnx_model import OnnxModel, read_tensor, tensor_bytes, without_weights
from relaxtune.models.spec import GENERATION_FILE, TOKENIZER_FILE

# Offsets on page boundaries let a runtime map the file.
_ALIGNMENT = 4096
_INLINE_BYTES = 1024
_LFS_POINTER = b"version https://git-lfs"
# A pointer is shorter, by its specification.
LFS_POINTER_BYTES = 1024
_COMPANIONS = (TOKENIZER_FILE, GENERATION_FILE)


def read_proto(path: Path) -> onnx.ModelProto:
    """Return the message in the file, nothing of it checked but that it is one and has a graph.

    Raises `ModelFileError`: not a readable regular file, empty, above 2 GiB, truncated, or not ONNX.
    """
    data = _read_bytes(path)
    if data.startswith(_LFS_POINTER):
        raise ModelFileError(f"{path} is a Git LFS pointer, not the model itself; fetch the model with `git lfs pull`")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as e:
        msg = f"{path} ({len(data)} bytes) is not an ONNX model, or it is truncated ({e}); copy or export it again"
        raise ModelFileError(msg) from e
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise ModelFileError(f"{path} ({len(data)} bytes) holds no graph, so it is not an ONNX model; export it again")
    return model


def companion_files(path: Path) -> list[Path]:
    """Return the files that an artifact of the model at `path` carries: beside it, or above a folder `onnx`."""
    folder = path if path.is_dir() else path.parent
    places = [folder, *([folder.parent] if folder.name == "onnx" else [])]
    found = (next((place / name for place in places if (place / name).is_file()), None) for name in _COMPANIONS)
    return [file for file in found if file is not None]


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file; a pipe or a device is an OSError, since its reader could wait for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a pipe or a device; save its content to a file")
    return path.read_bytes()


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file only names the content that Git LFS keeps elsewhere."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def save_model(model: OnnxModel, path: Path) -> Path:
    """Write a model to `path` and return it; above 2 GiB the weights go to `<path>.data` beside it.

    Both files are written under temporary names and renamed, the weights first, so that an interrupted write leaves no
    model that looks whole.

    Raises `ModelFileError`: the folder does not exist, or cannot be written.
    """
    data_path = path.with_name(path.name + ".data")
    try:
        if model.fits_protobuf:
            _write_whole(path, model.serialize())
            return path
        with _staged(data_path) as staged:
            proto = _write_weights(model, staged, data_path.name)
        _write_whole(path, proto.SerializeToString())
    except (OSError, EncodeError) as e:
        msg = f"model {model.name!r} cannot be written to {path}: {e}; free space or choose another folder"
        raise ModelFileError(msg) from e
    return path


def _read_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
    except FileNotFoundError as e:
        raise ModelFileError(f"no file {path}; expected an .onnx file, or a zoo name without a path") from e
    except (OSError, ValueError) as e:
        raise ModelFileError(f"{path} cannot be read: {e}") from e
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(f"{path} is a directory; expected an .onnx file: give the path of the file inside it")
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path} is not a regular file; expected an .onnx file")
    if status.st_size == 0:
        raise ModelFileError(f"{path} is empty (0 bytes); export or copy the model again")
    if status.st_size >= 2**31:
        raise ModelFileError(
            f"{path} has {status.st_size} bytes, a protobuf message has less than 2 GiB; "
            f"save the model with external data"
        )
    try:
        return path.read_bytes()
    except OSError as e:
        raise ModelFileError(f"{path} cannot be read: {e.strerror}; check its permissions") from e


def _write_weights(model: OnnxModel, path: Path, location: str) -> onnx.ModelProto:
    """Write the large weights one by one and return the graph that refers to them."""
    proto = without_weights(model.proto)
    with path.open("wb") as file:
        for tensor in model.proto.graph.initializer:
            written = proto.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            if tensor_bytes(tensor) <= _INLINE_BYTES:
                written.raw_data = _raw(tensor, model.data_dir)
                continue
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            written.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", location), ("offset", file.tell()), ("length", tensor_bytes(tensor))):
                written.external_data.add(key=key, value=str(value))
            file.write(_raw(tensor, model.data_dir))
    return proto


def _raw(tensor: onnx.TensorProto, data_dir: Path | None) -> bytes:
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return read_tensor(tensor, data_dir).tobytes()


def _write_whole(path: Path, data: bytes) -> None:
    with _staged(path) as staged:
        staged.write_bytes(data)


@contextlib.contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder that becomes `path` when the block ends well."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    staged = Path(name)
    try:
        yield staged
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.chmod(0o644)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
