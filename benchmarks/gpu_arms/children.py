"""The cases' processes: start a few, hear that they are ready, let one at a time do its timing.

A process that dies or takes too long while it prepares an arm is started again without that arm, once for each arm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from benchmarks.gpu_arms.order import Order

WORKER_MODULE = "benchmarks.gpu_arms.worker"

# Raw values of a case come as one line.
_LINE_LIMIT_BYTES = 1 << 26


class ChildError(Exception):
    """A case's process gave no result; the message says why."""


@dataclass
class Child:
    """One case's process, and what it said."""

    order: Order
    log: Path
    environment: Mapping[str, str]
    process: asyncio.subprocess.Process | None = None
    preparing: str | None = None
    crashed: dict[str, str] = field(default_factory=dict)

    async def prepare(self, timeout_s: float) -> None:
        """Start the process and wait until its arms are ready.

        Raises
        ------
        ChildError
            It ended, or was not ready in time, and there is no arm to leave out.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            self.preparing = None
            await self._start()
            try:
                await asyncio.wait_for(self._until("ready"), max(1.0, deadline - loop.time()))
            except (ChildError, TimeoutError) as error:
                reason = str(error) or f"not ready after {timeout_s:.0f} s"
                await self.stop()
                if not self._leave_out(reason) or loop.time() >= deadline:
                    where = self.preparing or "the case"
                    raise ChildError(f"{reason}, while preparing {where}; see {self.log}") from error
            else:
                return

    async def time(self, timeout_s: float) -> dict[str, object]:
        """Let the process time its arms and return its result.

        Raises
        ------
        ChildError
            It ended or was too slow.
        """
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            await self.process.stdin.drain()
            event = await asyncio.wait_for(self._until("result"), timeout_s)
        except (TimeoutError, ConnectionError) as error:
            raise ChildError(f"no result after {timeout_s:.0f} s of timing; see {self.log}") from error
        result: dict[str, object] = event["result"]
        skipped = result["skipped"]
        assert isinstance(skipped, dict)
        return {**result, "skipped": {**skipped, **self.crashed}}

    async def stop(self) -> None:
        """End the process and what it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        self.process = None

    def _leave_out(self, reason: str) -> bool:
        """Take the arm that was in work out of the order; False when there was none, or no other is left."""
        arm = self.preparing
        if arm is None or len(self.order.arms) == 1:
            return False
        self.crashed[arm] = f"{reason}; see {self.log.name}"
        self.order = replace(self.order, arms=tuple(name for name in self.order.arms if name != arm))
        return True

    async def _start(self) -> None:
        command = [sys.executable, "-m", WORKER_MODULE, self.order.to_json()]
        with self._open_log() as log:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(self.environment),
                limit=_LINE_LIMIT_BYTES,
                start_new_session=True,
            )

    def _open_log(self) -> IO[bytes]:
        return self.log.open("ab")

    async def _until(self, event_name: str) -> dict[str, dict[str, object]]:
        """Return the next event of a name, keeping track of the arm in work."""
        assert self.process is not None
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            event = json.loads(line)
            if event["event"] == "preparing":
                self.preparing = event["arm"]
            if event["event"] == event_name:
                return dict(event)
        code = await self.process.wait()
        raise ChildError(f"its process ended with code {code}")
