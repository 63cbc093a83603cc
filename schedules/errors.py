"""The errors of this package, and the refusal, which is an answer and no error.

ScheduleError
├── TargetError          a target text that cannot be understood, or that this machine cannot serve
└── UnscheduledError     a kernel for which not even the last rule gave a schedule
"""

from __future__ import annotations

from dataclasses import dataclass


class ScheduleError(Exception):
    """Base of everything that `schedules` raises on purpose."""


class TargetError(ScheduleError):
    """A target text that cannot be understood, or a target that is not complete here."""


class UnscheduledError(ScheduleError):
    """A PrimFunc that no rule, the generic one included, could schedule."""


@dataclass(frozen=True)
class Refusal:
    """Why a function is not what a reader looks for, or why a template does not make a kernel for it."""

    reason: str
