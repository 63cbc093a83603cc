"""`make demo-batch`: the plan docs/demo-batch.toml on a Ray cluster of this machine, with a PostgreSQL of its own.

The cluster has a head without a CPU, a node that measures and a node that builds. What is made goes to .demo.
"""

from __future__ import annotations

import time
from pathlib import Path

from relaxtune.pipeline.cli.app import main
from tests.pipeline.tuning.ray.clusters import small_cluster
from tests.tuning_db.postgres_server import running_server

_PLAN = Path(__file__).parent.parent / "docs" / "demo-batch.toml"


def demo(folder: Path) -> None:
    """Carry the plan out, and write the page on it."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / _PLAN.name
    began = time.monotonic()
    with running_server() as url, small_cluster() as cluster:
        print(f"{time.monotonic() - began:.0f} s: PostgreSQL and a Ray cluster of three nodes are there", flush=True)
        plan.write_text(_PLAN.read_text(encoding="utf-8").replace('"batch.db"', f'"{url}"'), encoding="utf-8")
        for words in (
            ["cluster", "check", cluster.address],
            ["batch", "run", str(plan), "--cluster", cluster.address],
            ["batch", "report", str(plan), "--out", str(folder / "demo-batch.html")],
        ):
            _run(words)
            print(f"{time.monotonic() - began:.0f} s: relaxtune {' '.join(words[:2])}", flush=True)
    print(f"{time.monotonic() - began:.0f} s in all")


def _run(words: list[str]) -> None:
    try:
        main(words)
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    demo(Path(".demo"))
