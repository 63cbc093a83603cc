"""Time the dashboard's pages over a large database: each is asked for ten times through its server.

    python -m benchmarks.database.bench_dashboard [--records 1000000] [--database FILE] [--out FILE.json]

The database has the records of `benchmarks.database.bench_tuning_db`, one job a model; a file that is there already is
taken as it is. Prints the median and the longest time of each page, in ms, until its last byte is here. The first
answer is told apart: nothing is in SQLite's memory then. Where an answer is a page that waits, `ready` is when the
page itself is here, asked for as often as a browser does.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import uvicorn

from benchmarks.database.bench_tuning_db import fill
from benchmarks.this_run import run_facts
from relaxtune.pipeline.dashboard.server import create_app
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase

ASKED = 10
_LINK = re.compile(r'href="(/(?:(?:jobs|tasks|models)/[^"]+|coverage|cost))"')
_AGAIN = re.compile(r'http-equiv="refresh" content="(\d+)"')


@contextmanager
def serving(database: TuningDatabase) -> Iterator[str]:
    """Serve the dashboard on a free port inside the block; yields its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(database), port=0, log_level="warning"))
    socket = server.config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def answer(address: str) -> tuple[float, str]:
    """Return the milliseconds until a page is here, and the page."""
    began = time.perf_counter()
    with urlopen(address) as reply:
        text = reply.read().decode()
    return (time.perf_counter() - began) * 1e3, text


def shown(address: str) -> tuple[float, float, str]:
    """Return the milliseconds until a page's first answer and until the page itself is here, and the page."""
    began = time.perf_counter()
    first, text = answer(address)
    while (again := _AGAIN.search(text)) is not None:
        time.sleep(int(again[1]))
        text = answer(address)[1]
    return first, (time.perf_counter() - began) * 1e3, text


def kind(page: str) -> str:
    """Return the first part of a page's address."""
    return page.split("/")[1]


def main() -> None:
    """Fill, serve, ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--database", type=Path, help="made there, and kept")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pages: dict[str, dict[str, float]] = {}
    with temporary_folder() as folder:
        path = arguments.database or Path(folder) / "records.db"
        if not path.exists():
            with TuningDatabase.open(path) as database:
                fill(database, arguments.records, None)
        with TuningDatabase.open(path, mode=Mode.READ_ONLY, create=False) as database, serving(database) as address:
            asked = ["/"]
            for page in asked:
                first, ready, text = shown(address + page)
                later = [shown(address + page)[:2] for _ in range(ASKED)]
                times = [painted for painted, _ in later]
                pages[page] = {
                    "first": first,
                    "ready": ready,
                    "median": statistics.median(times),
                    "longest": max(times),
                    "ready_median": statistics.median(whole for _, whole in later),
                }
                # One page of each kind that this one leads to.
                links = {kind(link): link for link in _LINK.findall(text)}
                asked += [link for name, link in links.items() if name not in map(kind, asked)]
                told = ", ".join(f"{name} {value:.0f} ms" for name, value in pages[page].items())
                print(f"{page}: {told}", flush=True)
            records = database.info().records
    if arguments.out is not None:
        document = {"machine": run_facts(), "records": records, "asked": ASKED, "pages_ms": pages}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
