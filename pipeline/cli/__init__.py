"""The command line: `main` is what the `relaxtune` script calls; `app.py` joins the commands."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from relaxtune.pipeline.cli import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app.main()
