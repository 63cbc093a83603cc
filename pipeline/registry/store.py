"""`ArtifactStore`: a folder that keeps artifacts by what they are, each once, whole.

::

    STORE/objects/KEY      an artifact; KEY is the hash of its model, target and files (`tuning_db.artifacts.Artifact`)
          tags/NAME        a link to one of them: a path that a service can load from
          lock             held shared by who adds or tags, alone by who collects

The database says where a tag stands; the links follow it, each replaced in one step. A store at a URL is
`pipeline.registry.remote`'s.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from relaxtune.pipeline.artifact.directory import load_manifest, record_validation, verify_artifact
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, Manifest
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.temporary import locked_folder, sweep
from relaxtune.tuning_db.artifacts import Artifact

_STAGING = ".staging-"


class ArtifactStore:
    """A store of artifacts in a folder; many processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        """Hold a folder, which the first artifact makes."""
        self.folder = folder.absolute()
        self.name = str(self.folder)
        self._objects = self.folder / "objects"
        self._tags = self.folder / "tags"

    @contextmanager
    def lock(self, *, alone: bool = False) -> Iterator[None]:
        """Hold the store: nothing is collected meanwhile, and with `alone` nothing is added or tagged.

        Raises `ArtifactError`: the folder cannot be made.
        """
        try:
            self._objects.mkdir(parents=True, exist_ok=True)
            self._tags.mkdir(exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise ArtifactError(
                f"store {self.folder} cannot be used: {e.strerror or e}; name another with --store"
            ) from e
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)

    def list_keys(self) -> list[str]:
        """Return the keys of the artifacts that are here, in order."""
        if not self._objects.is_dir():
            return []
        return sorted(path.name for path in self._objects.iterdir() if (path / MANIFEST_FILE).is_file())

    def require(self, key: str) -> None:
        """Raise `ArtifactError` if an artifact is not here."""
        if not (self._objects / key / MANIFEST_FILE).is_file():
            raise missing(self.name, key)

    def path_of(self, key: str) -> Path:
        """Return where an artifact lies; raise `ArtifactError` if it is not here."""
        self.require(key)
        return self._objects / key

    def place_of(self, key: str) -> str:
        """Return where an artifact lies, for people."""
        return str(self._objects / key)

    def manifest_of(self, key: str) -> Manifest:
        """Return the manifest of an artifact."""
        return load_manifest(self.path_of(key))

    def added_at(self, key: str) -> datetime:
        """Return since when an artifact has been here."""
        return datetime.fromtimestamp(self.path_of(key).stat().st_ctime).astimezone()

    def put(self, directory: Path) -> Artifact:
        """Keep a copy of an artifact and return its database form; one that is here already takes a newer validation.

        Raises `ArtifactError`: it is none, is damaged, or cannot be copied. Nothing is left then.
        """
        manifest = verify_artifact(directory)
        key = artifact_of(manifest, directory).key
        place = self._objects / key
        with self.lock():
            if place.exists():
                if manifest.validation is not None and load_manifest(place).validation != manifest.validation:
                    record_validation(place, manifest.validation)
            else:
                self.keep(key, lambda copy: shutil.copytree(directory, copy))
        return artifact_of(verify_artifact(place), place)

    def keep(self, key: str, write: Callable[[Path], object]) -> None:
        """Keep what `write` makes in a place that it is given, once it is whole and has this key; holds the store.

        Raises `ArtifactError`: it cannot be written, is damaged, or is another artifact. Nothing is left then.
        """
        place = self._objects / key
        sweep(self._objects, _STAGING)
        with locked_folder(self._objects, _STAGING) as staging:
            copy = staging / key
            try:
                write(copy)
            except OSError as e:
                raise ArtifactError(f"an artifact cannot be copied to {place}: {e}") from e
            found = artifact_of(verify_artifact(copy), copy).key
            if found != key:
                raise ArtifactError(f"what was to be {place} is artifact {found[:12]}; the store is damaged")
            try:
                copy.rename(place)
            except OSError:
                # Another process put the same one there meanwhile.
                if not place.exists():
                    raise

    def link(self, tag: str, key: str | None) -> None:
        """Have a tag's link lead to an artifact, in one step; with None it is taken away."""
        link = self._tags / tag
        if key is None:
            link.unlink(missing_ok=True)
            return
        staged = self._tags / f".{tag}.{os.getpid()}"
        staged.unlink(missing_ok=True)
        staged.symlink_to(Path("..") / "objects" / key)
        staged.replace(link)

    def links(self) -> dict[str, str]:
        """Return where the links lead: tag -> key."""
        if not self._tags.is_dir():
            return {}
        found = (path for path in self._tags.iterdir() if path.is_symlink() and not path.name.startswith("."))
        return {path.name: path.readlink().name for path in sorted(found)}

    def remove(self, key: str) -> None:
        """Remove an artifact; who holds it open keeps it. The caller holds the store alone."""
        gone = self._objects / f"{_STAGING}gone-{key}"
        self.path_of(key).rename(gone)
        shutil.rmtree(gone)


def missing(store: str, key: str) -> ArtifactError:
    """Return the error of an artifact that a store does not have."""
    return ArtifactError(f"store {store} has no artifact {key[:12]}; `relaxtune artifact list` lists its artifacts")
