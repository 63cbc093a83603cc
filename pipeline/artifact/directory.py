"""The artifact directory: written whole or not at all, checked before anything in it runs.

::

    DIR/model.so              the compiled module
        params.safetensors    the weights that are not embedded in it
        encoder/              the encoder of a decoder that generates, an artifact of its own
        tokenizer.json        beside the model, so is generation_config.json
        manifest.json         what it is, and the sha256 of every file
        manifest.sig          a signature of the manifest, where one was asked for (`pipeline.artifact.signature`)

A new artifact is staged in a sibling directory of its process, flushed to disk, checked by hash and renamed into place
under a lock. An existing directory is replaced only when it is an artifact itself (or empty).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from relaxtune.pipeline.artifact.entries import FileEntry, PaddingEntry
from relaxtune.pipeline.artifact.manifest import (
    ENCODER_FOLDER,
    MANIFEST_FILE,
    SIGNATURE_FILE,
    Manifest,
    parse_manifest,
)
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.temporary import locked_folder, sweep

logger = logging.getLogger(__name__)

# Of linux/fcntl.h and linux/fs.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_directory(destination: Path, write_files: Callable[[Path], Manifest], beside: Path | None = None) -> Manifest:
    """Write an artifact whole or not at all; return its manifest with the hashes of its files.

    `destination`: the artifact's directory; its parent is made if missing.
    `write_files`: writes every file but the manifest into the directory it is given, and returns the manifest without
    hashes.
    `beside`: another artifact. A file that is only a second name of one there is not read again: its hash is known.
    Raises `ArtifactError`: the destination exists and is no artifact, or cannot be written (read-only, disk full).
    Nothing is left.
    """
    destination = destination.absolute()
    with stage_beside(destination) as staging, _os_errors(destination):
        # mkdtemp makes private directories; an artifact is as readable as any other output.
        staging.chmod(0o777 & ~_umask())
        manifest = write_files(staging)
        known = {} if beside is None else load_manifest(beside).files
        files = {
            name: known[name]
            if beside is not None and name in known and (staging / name).samefile(beside / name)
            else hash_file(staging / name)
            for name in sorted(_names_in(staging))
        }
        complete = manifest.with_files(files)
        (staging / MANIFEST_FILE).write_text(complete.to_json(), encoding="utf-8")
        for path in staging.rglob("*"):
            _flush(path)
        _flush(staging)
        load_manifest(staging)
        accept(staging, destination)
    return complete


def copy_artifact(source: Path, destination: Path) -> Manifest:
    """Copy an artifact as it is, signature included, whole or not at all; return its manifest.

    Raises `ArtifactError`: it is damaged, or the destination is as `write_directory` refuses it.
    """
    destination = destination.absolute()
    with stage_beside(destination) as staging, _os_errors(destination):
        shutil.copytree(source, staging, dirs_exist_ok=True)
        manifest = verify_artifact(staging)
        accept(staging, destination)
    return manifest


def check_destination(destination: Path) -> None:
    """Check that an artifact can be written, before hours of work go into it; nothing is left there.

    Raises `ArtifactError`: as `write_directory` would raise for the same reason.
    """
    destination = destination.absolute()
    _check_replaceable(rejected_place(destination))
    with _os_errors(destination):
        missing = [folder for folder in (destination.parent, *destination.parent.parents) if not folder.exists()]
        with stage_beside(destination):
            pass
        for folder in missing:
            folder.rmdir()


def rejected_place(destination: Path) -> Path:
    """Return where an artifact that failed its validation is kept: `DIR.rejected`."""
    return destination.with_name(f"{destination.name}.rejected")


def accept(artifact: Path, destination: Path) -> None:
    """Move an artifact to its destination, in place of an artifact that is there; log which one was replaced.

    Raises `ArtifactError`: the destination has become something else than an artifact meanwhile, or cannot be written.
    """
    with _os_errors(destination), _locked(destination):
        _check_replaceable(destination)
        before = _find_manifest(destination)
        _move_into_place(artifact, destination)
    after = _find_manifest(destination)
    if before is not None and after is not None:
        other = before.source != after.source
        note = f": it was of another model, {before.source}; to keep both, give each its own --out" if other else ""
        logger.log(logging.WARNING if other else logging.INFO, "the artifact in %s was replaced%s", destination, note)


def remove_rejected(destination: Path, model_sha256: str) -> None:
    """Remove what an earlier build of the same model left in `DIR.rejected`."""
    rejected = rejected_place(destination)
    if rejected.is_dir():
        with _os_errors(rejected), _locked(rejected):
            kept = _find_manifest(rejected)
            if kept is not None and kept.model_sha256 == model_sha256:
                shutil.rmtree(rejected, ignore_errors=True)


def load_manifest(directory: Path) -> Manifest:
    """Return the manifest of an artifact; the other files are not read.

    Raises `ArtifactError`: there is no artifact, or its manifest is damaged or of an unknown format version.
    """
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ArtifactError(f"artifact {directory} {what}; expected the directory that `relaxtune compile --out` wrote")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise ArtifactError(
            f"{directory} is not an artifact: it has no {MANIFEST_FILE}; name a folder that compile or tune wrote"
        ) from e
    except (OSError, UnicodeDecodeError) as e:
        raise ArtifactError(f"{path} cannot be read ({e}); the artifact is damaged, compile it again") from e
    manifest = parse_manifest(text, str(path))
    for name in manifest.files:
        if Path(name).name != name.removeprefix(f"{ENCODER_FOLDER}/"):
            raise ArtifactError(f"manifest of {directory} names {name!r}, which is not a file of the artifact itself")
    unlisted = sorted(manifest.needed_files - manifest.files.keys())
    if unlisted:
        raise ArtifactError(f"{path} has no hash of {', '.join(unlisted)}; the artifact is damaged, compile it again")
    return manifest


def verify_artifact(directory: Path) -> Manifest:
    """Return the manifest after checking every file against its recorded size and sha256.

    Raises `ArtifactError`: a file is missing or changed, one is there that the manifest does not know, or the manifest
    itself is bad.
    """
    manifest = load_manifest(directory)
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"artifact {directory} lacks its file {name}; copy the directory again, or recompile")
        try:
            got = hash_file(path)
        except OSError as e:
            raise ArtifactError(f"{path} cannot be read ({e}); copy the artifact again, or recompile") from e
        if got != expected:
            raise ArtifactError(
                f"{path} was changed after it was written: expected {expected.bytes} bytes with sha256 "
                f"{expected.sha256}, got {got.bytes} bytes with {got.sha256}; copy the artifact again, or recompile"
            )
    known = {*manifest.files, MANIFEST_FILE, SIGNATURE_FILE}
    foreign = sorted(_names_in(directory) - known)
    if foreign:
        raise ArtifactError(
            f"artifact {directory} holds what its manifest does not know: {', '.join(foreign[:5])}; remove it"
        )
    return manifest


def record_validation(directory: Path, report: Mapping[str, object]) -> Manifest:
    """Store the result of a validation (plain JSON data) in the manifest, atomically; return the new manifest.

    Raises `ArtifactError`: the directory is no artifact, or cannot be written.
    """
    return _replace_manifest(directory, load_manifest(directory).with_validation(report))


def record_padding(directory: Path, padding: tuple[PaddingEntry, ...]) -> Manifest:
    """Store along which axes calls may be padded in the manifest, atomically; return the new manifest.

    Raises `ArtifactError`: the directory is no artifact, has no buckets, or cannot be written.
    """
    manifest = load_manifest(directory)
    if manifest.buckets is None:
        raise ArtifactError(f"artifact of {manifest.model} has no shape buckets, so nothing is padded")
    return _replace_manifest(directory, replace(manifest, buckets=replace(manifest.buckets, padding=padding)))


def _replace_manifest(directory: Path, manifest: Manifest) -> Manifest:
    with _os_errors(directory):
        descriptor, name = tempfile.mkstemp(prefix=f".{directory.name}.manifest-", dir=directory.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(manifest.to_json())
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(directory / MANIFEST_FILE)
            _flush(directory)
        finally:
            temporary.unlink(missing_ok=True)
    name, whole = f"{directory.name}/{MANIFEST_FILE}", _find_manifest(directory.parent)
    if whole is not None and name in whole.files:  # the encoder's artifact inside another one
        files = {**whole.files, name: hash_file(directory / MANIFEST_FILE)}
        _replace_manifest(directory.parent, whole.with_files(files))
    return manifest


def _names_in(directory: Path) -> set[str]:
    """Return the names of all files of an artifact, those of its encoder with the folder before them."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def hash_file(path: Path) -> FileEntry:
    """Return the size and sha256 of a file."""
    with path.open("rb") as file:
        return FileEntry(hashlib.file_digest(file, "sha256").hexdigest(), file.tell())


@contextlib.contextmanager
def stage_beside(destination: Path) -> Iterator[Path]:
    """Give a new empty directory beside the destination, which must be free or an artifact; sweep what was left."""
    _check_replaceable(destination)
    with contextlib.ExitStack() as stack:
        with _os_errors(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            for kind in ("staging", "manifest"):
                sweep(destination.parent, f".{glob.escape(destination.name)}.{kind}-")
            staging = stack.enter_context(locked_folder(destination.parent, f".{destination.name}.staging-"))
        yield staging


@contextlib.contextmanager
def _locked(destination: Path) -> Iterator[None]:
    """Hold the lock of a destination against other processes: a file beside it, which the holder removes."""
    path = destination.with_name(f".{destination.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                break
        # The last holder has removed this file.
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _find_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of an artifact, None where there is none or it is damaged."""
    with contextlib.suppress(ArtifactError):
        return load_manifest(directory)
    return None


def _check_replaceable(destination: Path) -> None:
    if not destination.exists() and not destination.is_symlink():
        return
    if not destination.is_dir() or destination.is_symlink():
        raise ArtifactError(f"{destination} exists and is not a directory; choose another --out, or remove it")
    if any(destination.iterdir()) and not (destination / MANIFEST_FILE).is_file():
        raise ArtifactError(
            f"{destination} exists and is not an artifact (no {MANIFEST_FILE}), so it is not replaced; "
            "choose another --out, or remove it"
        )


def _move_into_place(staging: Path, destination: Path) -> None:
    """Rename `staging` to `destination`; an artifact there changes places with it in one step, and then goes.

    Whenever the process is killed, one of the two is at the destination, whole.
    """
    if not destination.exists():
        staging.rename(destination)
    elif any(destination.iterdir()):
        _exchange(staging, destination)
        shutil.rmtree(staging, ignore_errors=True)
    else:
        staging.replace(destination)
    _flush(destination.parent)


def _exchange(a: Path, b: Path) -> None:
    """Give each of two directories the other's name, in one step (renameat2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(b))
    # A file system that cannot: a kill between the next two lines leaves `b` under another name.
    aside = a.with_name(f"{a.name}-old")
    b.rename(aside)
    try:
        a.rename(b)
    except OSError:
        aside.rename(b)
        raise
    aside.rename(a)


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _os_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ArtifactError(
            f"artifact {where} cannot be written: {e.strerror or e}; nothing was left there. "
            "Check that the folder is writable and has room, or choose another --out"
        ) from e
