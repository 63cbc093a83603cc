"""Boards of a tracker, side by side: as many as are registered under a key."""

from __future__ import annotations

from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tuning.measure.backend import Capabilities
from relaxtune.pipeline.tuning.measure.side_by_side import SideBySide
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.rpc.measurer import RpcMeasurer, boards_of
from relaxtune.tuning_db.records import Environment


class RpcBackend(SideBySide):
    """Measures on boards of one model; builders are elsewhere, so that they disturb no clock.

    Parameters
    ----------
    tracker : tuple of str and int
        Host and port of the tracker.
    key : str
        The boards' key there.
    environment : Environment
        What the boards are: it cannot be asked of a server without Python.
    options, timeout_s, stop, seed
        See `RpcMeasurer`.

    Raises
    ------
    UsageError
        The tracker does not answer, or no board is registered under the key.
    """

    def __init__(
        self,
        tracker: tuple[str, int],
        key: str,
        environment: Environment,
        options: MeasureOptions | None = None,
        timeout_s: float = 30.0,
        stop: StopSignal | None = None,
        seed: int = 0,
    ) -> None:
        shared = (options or MeasureOptions(), timeout_s, stop or StopSignal(), seed)
        boards = count_boards(tracker, key)
        measurers = [RpcMeasurer(tracker, key, environment, *shared, f"{key} {number}") for number in range(boards)]
        capabilities = Capabilities(environment.device_kind, environment.device_name, compares=False, undisturbed=True)
        super().__init__(measurers, capabilities)


def count_boards(tracker: tuple[str, int], key: str) -> int:
    """Return how many boards are registered under a key.

    Raises
    ------
    UsageError
        The tracker does not answer, or there is none.
    """
    host, port = tracker
    try:
        boards = boards_of(tracker, key)
    except (RuntimeError, OSError) as e:
        raise UsageError(
            f"no RPC tracker answers at {host}:{port} ({e}): start one with "
            f"`python -m tvm.exec.rpc_tracker --port {port}`"
        ) from e
    if not boards:
        raise UsageError(
            f"no board is registered as {key} at {host}:{port}. On the board run "
            f"`python -m tvm.exec.rpc_server --tracker {host}:{port} --key {key}`"
        )
    return boards
