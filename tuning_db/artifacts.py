"""Artifacts made from records, their validations and their latencies."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from datetime import datetime

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.records import Environment, TargetKey, content_key, normalise, utc_now


@dataclass(frozen=True)
class Artifact:
    """A compiled module; `manifest` is its canonical JSON, `location` where it was written, for people."""

    model: str
    model_sha256: str
    target: TargetKey
    manifest: str
    location: str = ""
    job_id: str | None = None
    created_at: datetime = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        """Bring the manifest to canonical JSON and the time to UTC."""
        normalise(self, text="model location", json="manifest", utc="created_at")

    @property
    def key(self) -> str:
        """The sha256 of what it is: model, target and the hashes of its files, wherever and whenever it was written.

        Other fields of a manifest do not count, since a later version may write them anew; one without `files` counts
        whole.
        """
        manifest = json.loads(self.manifest)
        files = manifest.get("files") if isinstance(manifest, dict) else None
        return content_key([self.model, self.model_sha256, self.target.key, files or manifest])


@dataclass(frozen=True)
class Validation:
    """A comparison of an artifact with the reference; `report` is canonical JSON, `max_abs` may be infinite or NaN."""

    artifact_key: str
    environment: Environment
    passed: bool
    samples: int
    max_abs: float
    report: str = "{}"
    created_at: datetime = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        """Bring the report to canonical JSON; refuse a pass that is none."""
        normalise(self, json="report", utc="created_at")
        if self.passed and not (math.isfinite(self.max_abs) and self.samples > 0):
            raise InvalidRecordError(
                f"A validation of artifact {self.artifact_key} passed with max_abs={self.max_abs} over {self.samples} "
                "samples: expected a finite error over at least one sample. Store it as not passed."
            )

    @property
    def key(self) -> str:
        """The sha256 of all fields."""
        seen = [self.passed, self.samples, repr(float(self.max_abs)), json.loads(self.report)]
        return content_key([self.artifact_key, self.environment.key, *seen, self.created_at.isoformat()])


@dataclass(frozen=True)
class Benchmark:
    """Raw latencies of one arm of a benchmark: the artifact itself (`relaxtune`), or a peer of the same benchmark."""

    artifact_key: str
    environment: Environment
    arm: str
    latencies_us: tuple[float, ...]
    conditions: str = "{}"
    created_at: datetime = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        """Bring the conditions to canonical JSON; refuse latencies that are none."""
        object.__setattr__(self, "latencies_us", tuple(float(value) for value in self.latencies_us))
        normalise(self, json="conditions", utc="created_at")
        if not self.latencies_us or not all(math.isfinite(value) and value > 0 for value in self.latencies_us):
            raise InvalidRecordError(
                f"A benchmark of artifact {self.artifact_key}, arm {self.arm!r}, has latencies_us={self.latencies_us}: "
                "expected at least one, all finite and above 0. Leave an arm out that did not run."
            )

    @property
    def latency_us(self) -> float:
        """The median of the raw latencies."""
        return statistics.median(self.latencies_us)

    @property
    def key(self) -> str:
        """The sha256 of all fields."""
        seen = [self.arm, self.latencies_us, json.loads(self.conditions)]
        return content_key([self.artifact_key, self.environment.key, *seen, self.created_at.isoformat()])
