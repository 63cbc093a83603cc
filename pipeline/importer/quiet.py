"""Silence the libraries that report to the screen what the importer reports in its own errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NOISY_LOGGERS = ("onnxscript", "onnx_ir")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence Python warnings and the loggers of onnx-ir and onnxscript while the block runs.

    They report folds they gave up and names they changed. Neither loses information here: a node that was not folded
    is converted or named in an `ImportFailedError`, and names are mapped back.
    """
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
