"""`relaxtune dashboard`: a page of the tuning database to leave open."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from relaxtune.pipeline.cli.db.common import open_for_reading
from relaxtune.pipeline.cli.groups import option, takes_groups
from relaxtune.pipeline.cli.options import DEFAULT_DATABASE, DatabaseOption
from relaxtune.pipeline.cli.output import stderr_console
from relaxtune.pipeline.errors import UsageError

TOKEN_VARIABLE = "RELAXTUNE_DASHBOARD_TOKEN"
_PORT = 8760


@takes_groups()
def dashboard(
    db: DatabaseOption = DEFAULT_DATABASE,
    host: str = option("127.0.0.1", "Address to listen at; beyond this machine, browsers need a token."),
    port: int = option(_PORT, "Port to listen at; 0 picks a free port.", min=0, max=65535),
    ceilings: list[Path] | None = option(None, "JSON of a device's measured ceilings (repeatable).", metavar="FILE"),
) -> None:
    """Serve pages about the database until Ctrl-C: batches, jobs, tasks, artifacts, failures.

    Pages are read only; pages of running work refresh. If --host is beyond this machine, browsers need a token:
    RELAXTUNE_DASHBOARD_TOKEN, or a token that the server creates and prints.
    """
    try:
        import uvicorn

        from relaxtune.pipeline.dashboard.server import LOOPBACK, create_app
        from relaxtune.pipeline.report.ceilings import read_ceilings
    except ModuleNotFoundError as e:
        raise UsageError(f"the dashboard needs {e.name}: pip install 'relaxtune[dashboard]'") from e
    measured = [read_ceilings(file) for file in ceilings or ()]
    with open_for_reading(db) as database:
        local = host in LOOPBACK
        token = os.environ.get(TOKEN_VARIABLE) or (None if local else secrets.token_urlsafe(24))
        app = create_app(database, hosts=LOOPBACK if local else ("*",), token=token, ceilings=measured)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        try:
            listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as e:
            raise UsageError(
                f"cannot listen at {host}:{port}: {e.strerror or e}; choose another --port or --host"
            ) from e
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
        shown = f"{address}{f'?token={token}' if token else ''} shows {database.url}; Ctrl-C ends it"
        stderr_console().print(shown, markup=False, highlight=False, soft_wrap=True)
        # Ctrl-C is how it ends.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
