"""The ONNX file of a folder in the hub's layout, or of a repository of the hub: there already, or exported once."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import onnx

import relaxtune
from relaxtune.models.errors import ModelFileError, UnknownModelError, UnsupportedModelError
from relaxtune.models.external_data import check_external_data, external_tensors
from relaxtune.models.files import companion_files, read_proto
from relaxtune.models.hub.pooling import Pooling, pool, read_json, read_pooling
from relaxtune.models.onnx_model import read_in, tensor_bytes
from relaxtune.models.spec import TOKENIZER_FILE

log = logging.getLogger(__name__)

HUB_PREFIX = "hf:"
# Raised by one when an export of the same folder would have another graph.
_CACHE_VERSION = 1
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_GRAPHS = ("model.onnx", "onnx/model.onnx")
_SMALL_FILES = ["*.json", "*/config.json", "*.txt", "*.model"]
_CONTENT_SUFFIXES = {".json", ".safetensors", ".bin", ".txt", ".model", ".onnx", ".onnx_data", ".data"}
_INSTALL = "pip install 'relaxtune[export]'"


def is_folder(source: str | Path) -> bool:
    """Return whether a model is named by a folder or by a repository of the hub (`hf:ORG/NAME`)."""
    return str(source).startswith(HUB_PREFIX) or Path(source).is_dir()


def model_path(source: str | Path) -> Path:
    """Return the ONNX file of a model; an export of a folder or repository is kept in the user's cache, and made once.

    Where a decoder is several files (`models.decoder_files`), it is their folder.

    Raises `ModelFileError`: the folder is in another layout, or cannot be read; `UnknownModelError`: the hub has no
    such repository, or does not show it; `UnsupportedModelError`: the architecture is not known, its export failed, or
    a package is missing.
    """
    if not is_folder(source):
        return Path(source)
    text = str(source)
    folder = _snapshot(text.removeprefix(HUB_PREFIX)) if text.startswith(HUB_PREFIX) else Path(source)
    name = text.partition("@")[0].rpartition("/")[2] if text.startswith(HUB_PREFIX) else folder.absolute().name
    graph, pooling = _find_graph(folder), read_pooling(folder)
    if graph is not None and pooling is None:
        return graph
    if graph is None and not (folder / "config.json").is_file():
        raise ModelFileError(
            f"{folder} is a directory; expected an .onnx file, or a folder as the Hugging Face hub has them: a "
            "config.json beside model.safetensors, or ONNX files"
        )
    # A snapshot is called by its commit.
    key = folder.name if text.startswith(HUB_PREFIX) else content_hash(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relaxtune" / "models"
    place = cache / f"{name}-{key[:16]}-{_CACHE_VERSION}"
    file = place / f"{name}.onnx"
    if file.is_file():
        log.info("%s: the ONNX file made earlier, %s", source, file)
        return file
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=place.parent) as staging:
            made = Path(staging) / "made"
            made.mkdir()
            _make(folder, graph, pooling, made / file.name)
            if not file.is_file():  # no other process was faster
                shutil.rmtree(place, ignore_errors=True)
                made.rename(place)
    except OSError as e:
        raise ModelFileError(
            f"the ONNX file of {source} cannot be kept in {place.parent}: {e.strerror or e}; free space there, or name "
            "another place by XDG_CACHE_HOME"
        ) from e
    return file


def _find_graph(folder: Path) -> Path | None:
    """Return the ONNX file in a folder, or the folder of a decoder's files; None where there is none."""
    for place in (folder, folder / "onnx"):
        if any(place.glob("*encoder*.onnx")) or any(place.glob("decoder_*.onnx")):
            return place
    for name in _GRAPHS:
        if (folder / name).is_file():
            return folder / name
    found = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ModelFileError(f"{folder} has several ONNX files and no model.onnx: name one of them ({names})")
    return found[0] if found else None


def content_hash(folder: Path) -> str:
    """Return the sha256 of the files of a folder that the model is made of."""
    places = [*folder.iterdir(), *folder.glob("*/config.json"), *folder.glob("onnx/*.onnx*")]
    digest = hashlib.sha256()
    for path in sorted(path for path in places if path.suffix in _CONTENT_SUFFIXES and path.is_file()):
        status = path.stat()
        content = _file_hash(path, status.st_size, status.st_mtime_ns)
        digest.update(f"{path.relative_to(folder)}\0{content}\0".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _file_hash(path: Path, _size: int, _changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(folder: Path, graph: Path | None, pooling: Pooling | None, file: Path) -> None:
    """Write the ONNX file of a folder, and beside it the files that go into the artifact."""
    if graph is None:
        report = _export(folder, file)
        if report["task"] == "embedding" and pooling is None:
            pooling = Pooling()
    if pooling is not None:
        source = graph or file
        model = read_proto(source)
        check_external_data(model, source.parent)
        for tensor in external_tensors(model):
            read_in(tensor, source.parent)
        pool(model, pooling)
        large = sum(map(tensor_bytes, model.graph.initializer)) >= 2**30
        onnx.save(model, file, save_as_external_data=large, location=f"{file.name}.data")
    for path in companion_files(graph or folder / file.name):
        if not (file.parent / path.name).is_file():
            shutil.copyfile(path, file.parent / path.name)
    tokenizer = file.parent / TOKENIZER_FILE
    if pooling is not None and pooling.max_tokens is not None and tokenizer.is_file():
        content = read_json(tokenizer)
        settings = {"direction": "Right", "strategy": "LongestFirst", "stride": 0}
        content["truncation"] = {**settings, "max_length": pooling.max_tokens}
        tokenizer.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _export(folder: Path, file: Path) -> dict[str, str]:
    """Export a folder in a process of its own; return what it says about the model."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedModelError(
            f"{folder} holds weights and no ONNX file, and {' and '.join(missing)} to export them are not installed: "
            f"{_INSTALL}"
        )
    log.info("%s: exporting to ONNX; an export is made once", folder)
    own = str(Path(relaxtune.__file__).parent.parent)
    paths = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "relaxtune.models.hub.export", str(folder.absolute()), str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        check=False, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}, perhaps out of memory"]
        log.debug("%s", done.stderr)
        raise UnsupportedModelError(
            f"{folder} cannot be exported: {said[-1].removeprefix('ExportError: ')}. If you have the model as an "
            "ONNX file, name that file"
        )
    report: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    seconds = time.monotonic() - started
    log.info("%s: %s, exported as %s in %.0f s", folder, report["architecture"], report["task"], seconds)
    return report


def _snapshot(text: str) -> Path:
    """Return the folder of a repository in the hub's cache, downloaded where it is not there yet."""
    if not _REPOSITORY.fullmatch(text):
        raise UnknownModelError(
            f"{HUB_PREFIX}{text} names no repository; expected {HUB_PREFIX}ORG/NAME or {HUB_PREFIX}ORG/NAME@REVISION"
        )
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as e:
        raise UnsupportedModelError(f"{HUB_PREFIX}{text} needs huggingface_hub: {_INSTALL}") from e
    repository, _, revision = text.partition("@")

    def download(*patterns: str) -> Path:
        # Without network it returns the snapshot that is on this machine.
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(patterns)))

    try:
        folder = download(
            *_SMALL_FILES, *_GRAPHS, *(f"{graph}{end}" for graph in _GRAPHS for end in ("_data", ".data"))
        )
        if _find_graph(folder) is None and not list(folder.glob("*.safetensors")):
            folder = download(*_SMALL_FILES, "*.safetensors")
    except errors.GatedRepoError as e:
        raise UnknownModelError(
            f"{repository} is gated: accept its terms at https://huggingface.co/{repository}, then log in with "
            "`hf auth login`"
        ) from e
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as e:
        raise UnknownModelError(
            f"the hub has no repository {text}, or it is private: check the name, or log in with `hf auth login`"
        ) from e
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as e:
        raise UnknownModelError(
            f"{repository} is not on this machine and the hub does not answer; connect to it, or name a local folder"
        ) from e
    if _find_graph(folder) is None and not list(folder.glob("*.safetensors")):
        raise UnknownModelError(f"{repository} has neither model.safetensors nor an ONNX file; export it to ONNX")
    return folder
