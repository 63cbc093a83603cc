"""Actors that wait instead of measuring, building and importing, for benchmarks.batch.bench_cluster.

Ray imports this file in the process of each. So it imports nothing of ours at first: 64 processes that import TVM take
four minutes of a core before the first of them waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relaxtune.pipeline.tuning.measure.backend import Built

# What is kept of a built kernel: of 30 to 78 KB, packed 8 to 21.
PACKED_BYTES = 16_000
# No measurement waits longer than so many means.
WAIT_MAX = 5.0


class WaitingActor:
    """Stands for a device."""

    def __init__(self, measure_s: float) -> None:
        self.measure_s, self.slept, self.first, self.last = measure_s, 0.0, 0.0, 0.0

    def begin(self) -> str:
        """Return the host."""
        return socket.gethostname()

    def call(self, _method: str, workload: str, code: bytes) -> float:
        """Wait, and return a latency."""
        digest = hashlib.sha256(workload.encode() + code).digest()
        part = int.from_bytes(digest[4:8], "big") / 2**32
        began = time.time()
        self.first = self.first or began
        time.sleep(self.measure_s * min(WAIT_MAX, -math.log1p(-part)))
        self.last = time.time()
        self.slept += self.last - began
        return (10.0 + 90.0 * int.from_bytes(digest[:4], "big") / 2**32) * 1e-6

    def told(self) -> tuple[float, float, float]:
        """Return the seconds waited, and when the first wait began and the last one ended."""
        return self.slept, self.first, self.last

    def leave(self) -> None:
        """Do nothing."""


class WaitingBuilders:
    """Stands for builders and importers: each build is a wait, as many at the same time as are asked for."""

    def __init__(self, build_s: float, import_s: float) -> None:
        self.build_s, self.import_s = build_s, import_s

    async def begin(self) -> None:
        """Import what an answer is made of."""
        from relaxtune.pipeline.tuning.measure.backend import Built  # noqa: F401

    async def prepare(self, path: str) -> bytes:
        """Wait, and return the bytes of a cell."""
        await asyncio.sleep(self.import_s)
        with open(path, "rb") as file:
            return file.read()

    async def build(self, what: bytes, *_: object) -> Built:
        """Wait, and return code that the kernel decides."""
        from relaxtune.pipeline.tuning.measure.backend import Built
        from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact
        from relaxtune.tuning_db.records import Status

        await asyncio.sleep(self.build_s)
        code = random.Random(hashlib.sha256(what).digest()).randbytes(PACKED_BYTES)
        return Built(Status.OK, BuiltArtifact(code, hashlib.sha256(code).hexdigest()), None, self.build_s)
