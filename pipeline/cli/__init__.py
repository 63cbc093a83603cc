"""The command line: `main` is what the `relaxtune` script calls; `app.py` joins the commands."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code; SIGTERM is as clean as Ctrl-C, from the first line to the end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # The last that Python does before it takes its handlers away.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in _SIGNALS])
    try:
        # The imports of a command are heavy; a signal may come meanwhile.
        from relaxtune.pipeline.cli import app
        from relaxtune.pipeline.cli.tvm_alone import leave_torch_out_of_tvm

        leave_torch_out_of_tvm()
        app.main()
    except SystemExit as ended:
        _end(ended.code)
        raise
    except KeyboardInterrupt:
        _end(_INTERRUPTED)


def _end(code: str | int | None) -> None:
    """Let no signal change the exit code any more; end an interrupted command here."""
    number = code if isinstance(code, int) else int(code is not None)
    for one in _SIGNALS:
        signal.signal(one, lambda *_: os._exit(number))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if number == _INTERRUPTED:
        # Python would wait for threads that are in TVM, or end them there, which aborts the process. Nothing is left to
        # do: files are whole by now, and children end with their parent.
        os._exit(number)
