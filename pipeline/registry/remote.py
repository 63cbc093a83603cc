"""`RemoteStore`: a store of artifacts at a URL of fsspec (`s3://`, `gs://`, `abfs://`, `file://`, ...).

::

    URL/objects/KEY/       the files of an artifact; it is there once its manifest.json is, which is written last
        tags/NAME          the key that a tag leads to, as text
        collecting         there while a process collects
        using/ID           there while a process adds or tags

Artifacts are used from a copy on this machine (`$XDG_CACHE_HOME/relaxtune/stores`, which may be deleted at any time).
A copy is taken over once its files have the hashes of its manifest, and its hash is KEY.

Such places have no locks. Who adds says so in `using`, then looks for `collecting`; who collects does the other way
round. Of two at a time, one sees the other and gives up.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from relaxtune.pipeline.artifact.directory import load_manifest, record_validation, verify_artifact
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, Manifest, parse_manifest
from relaxtune.pipeline.environment import user_here
from relaxtune.pipeline.errors import ArtifactError, PipelineError
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.registry.store import ArtifactStore, missing
from relaxtune.pipeline.temporary import cache_folder
from relaxtune.tuning_db.artifacts import Artifact
from relaxtune.tuning_db.records import utc_now
from relaxtune.tuning_db.urls import hide_secrets


class RemoteStore:
    """A store of artifacts at a URL; many processes of many machines may use it at once."""

    def __init__(self, url: str) -> None:
        """Hold a URL; nothing is there until the first artifact is."""
        self.name = hide_secrets(url.rstrip("/"))
        with self._remote("opened"):
            try:
                from fsspec.core import url_to_fs
            except ImportError as e:
                raise ArtifactError(
                    f"store {self.name} needs fsspec; install it: pip install 'relaxtune[remote]', and what fsspec "
                    "needs for this kind of URL (s3fs, gcsfs, adlfs)"
                ) from e
            self._files, root = url_to_fs(url.rstrip("/"))
        self._root = PurePosixPath(root)
        self._mirror = ArtifactStore(cache_folder("stores") / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16])

    @contextmanager
    def _remote(self, what: str) -> Iterator[None]:
        try:
            yield
        except PipelineError:
            raise
        except Exception as e:  # each kind of file system has its own errors
            raise ArtifactError(
                f"store {self.name} cannot be {what}: {type(e).__name__}: {hide_secrets(str(e))}; see that the URL and "
                "the credentials are right, and say it again"
            ) from e

    def _at(self, *parts: str) -> str:
        return str(self._root.joinpath(*parts))

    @contextmanager
    def lock(self, *, alone: bool = False) -> Iterator[None]:
        """Hold the store; see the head of the file.

        Raises `ArtifactError`: another process collects, or with `alone` uses it. It says which.
        """
        mine = self._at("collecting") if alone else self._at("using", uuid.uuid4().hex)
        with self._remote("held"):
            self._files.makedirs(str(PurePosixPath(mine).parent), exist_ok=True)
            who = f"{user_here()}, process {os.getpid()}, since {utc_now():%Y-%m-%d %H:%M} UTC"
            try:
                self._files.pipe_file(mine, who.encode(), mode="create")
            except FileExistsError as e:
                raise self._held(mine) from e
        try:
            with self._remote("held"):
                others = self._list("using") if alone else [self._at("collecting")]
                for other in others:
                    if self._files.exists(other):
                        raise self._held(other)
            yield
        finally:
            with self._remote("given back"):
                self._files.rm_file(mine)

    def _held(self, file: str) -> ArtifactError:
        who = "a process"
        with suppress(OSError):
            who = self._files.cat_file(file).decode(errors="replace")
        does = "collects" if file == self._at("collecting") else "adds or tags"
        return ArtifactError(
            f"store {self.name} is in use: {who} {does}; say it again when that is done, or remove {file} if that "
            "process was killed"
        )

    def _list(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            return sorted(str(name) for name in self._files.ls(self._at(folder), detail=False))
        except FileNotFoundError:
            return []

    def list_keys(self) -> list[str]:
        """Return the keys of the artifacts that are here, in order."""
        with self._remote("read"):
            keys = [PurePosixPath(path).name for path in self._list("objects")]
            return [key for key in keys if self._files.exists(self._at("objects", key, MANIFEST_FILE))]

    def require(self, key: str) -> None:
        """Check that an artifact is here."""
        with self._remote("read"):
            self._files.invalidate_cache()
            if not self._files.exists(self._at("objects", key, MANIFEST_FILE)):
                raise missing(self.name, key)

    def manifest_of(self, key: str) -> Manifest:
        """Return the manifest of an artifact."""
        self.require(key)
        place = self._at("objects", key, MANIFEST_FILE)
        with self._remote("read"):
            text = self._files.cat_file(place).decode()
        return parse_manifest(text, place)

    def place_of(self, key: str) -> str:
        """Return the URL of an artifact."""
        return f"{self.name}/objects/{key}"

    def added_at(self, key: str) -> datetime:
        """Return since when an artifact has been here."""
        with self._remote("read"):
            found: datetime = self._files.modified(self._at("objects", key, MANIFEST_FILE))
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)

    def path_of(self, key: str) -> Path:
        """Return the copy of an artifact on this machine, which is taken if it is not there."""
        manifest = self.manifest_of(key)

        def download(copy: Path) -> None:
            with self._remote("read"):
                for path in self._files.find(self._at("objects", key)):
                    place = copy / PurePosixPath(path).relative_to(PurePosixPath(self._at("objects", key)))
                    place.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(path, str(place))

        with self._mirror.lock():
            if key not in self._mirror.list_keys():
                self._mirror.keep(key, download)
            place = self._mirror.path_of(key)
            if manifest.validation is not None and load_manifest(place).validation != manifest.validation:
                record_validation(place, manifest.validation)
        return place

    def put(self, directory: Path) -> Artifact:
        """Keep a copy of an artifact and return its database form; one that is here already takes a newer validation.

        Raises `ArtifactError`: it is none, is damaged, or cannot be written. A part that was written is no artifact to
        any reader.
        """
        manifest = verify_artifact(directory)
        made = artifact_of(manifest, directory)
        with self.lock(), self._remote("written"):
            names = [*manifest.files]
            if self._files.exists(self._at("objects", made.key, MANIFEST_FILE)):
                if manifest.validation in (None, self.manifest_of(made.key).validation):
                    return made
                names = []
            signed = [path.name for path in directory.glob("manifest.sig")]
            for folder in {str(Path(name).parent) for name in (*names, MANIFEST_FILE)}:
                self._files.makedirs(self._at("objects", made.key, folder), exist_ok=True)
            for name in (*names, *signed, MANIFEST_FILE):
                self._upload(directory / name, self._at("objects", made.key, name))
        return made

    def _upload(self, file: Path, place: str) -> None:
        with self._files.transaction:
            self._files.put_file(str(file), place)
        self._files.invalidate_cache()
        there, here = self._files.size(place), file.stat().st_size
        if there != here:
            raise ArtifactError(f"{place} has {there} bytes, expected {here}; add it again")

    def link(self, tag: str, key: str | None) -> None:
        """Have a tag lead to an artifact, in one step; with None it is taken away."""
        place = self._at("tags", tag)
        with self._remote("written"):
            if key is None:
                if self._files.exists(place):
                    self._files.rm_file(place)
                return
            self._files.makedirs(self._at("tags"), exist_ok=True)
            with self._files.transaction:
                self._files.pipe_file(place, key.encode())

    def links(self) -> dict[str, str]:
        """Return where the tags lead: tag -> key."""
        with self._remote("read"):
            return {PurePosixPath(path).name: self._files.cat_file(path).decode() for path in self._list("tags")}

    def remove(self, key: str) -> None:
        """Remove an artifact, its manifest first: the rest is no artifact to any reader."""
        with self._remote("written"):
            self._files.rm_file(self._at("objects", key, MANIFEST_FILE))
            self._files.rm(self._at("objects", key), recursive=True)
