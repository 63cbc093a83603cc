"""One question to a child process."""

from __future__ import annotations

from relaxtune.pipeline.processes.process import ChildProcess

_ANSWERS_WITHIN_S = 30


def asked(child: ChildProcess, request: object) -> object:
    """Return what a child answers, or the error that it tells, once it is ready."""
    if not child.ready:
        assert child.connection.poll(_ANSWERS_WITHIN_S)
        child.receive()
    child.send(request)
    assert child.connection.poll(_ANSWERS_WITHIN_S)
    reply = child.receive()
    return reply.value if reply.error is None else reply.error
