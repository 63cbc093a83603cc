"""The errors a user can meet, the tree they form, and the exit code of each.

::

    PipelineError                     exit 1   base of this package
    ├── UsageError                    exit 2   the request itself is wrong (bad option, bad value)
    ├── ImportFailedError             exit 1   an ONNX node stops the import
    ├── LoweringError                 exit 1   a pass or the code generator refuses the module
    ├── ArtifactError                 exit 1   an artifact is missing, damaged, or built for another target
    ├── ValidationFailedError         exit 3   outputs differ from ONNX Runtime beyond tolerance
    ├── MeasuringBrokenError          exit 1   candidates cannot be built or measured any more
    ├── NothingMeasuredError          exit 4   a tuning run ended without one valid measurement
    ├── GateRefusedError              exit 5   a gate says that a build may not take the place of another
    └── InterruptedEarlyError         exit 130 a tuning run was interrupted before anything useful was kept

    relaxtune.models.errors.ModelError          exit 1   the model file or zoo name
    relaxtune.schedules.errors.ScheduleError    exit 1   target text, limits, templates
    relaxtune.tuning_db.errors.TuningDatabaseError  exit 1   the tuning database

Every message says what went wrong, in which object, what was expected against what was found, and how to go on.
"""

from __future__ import annotations

from typing import ClassVar


class PipelineError(Exception):
    """Base of the errors raised by `pipeline`; `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1


class UsageError(PipelineError):
    """The request cannot be carried out as written: an option or a value is wrong."""

    exit_code = 2


class ImportFailedError(PipelineError):
    """An ONNX graph cannot be converted to Relax; the message names the node."""


class LoweringError(PipelineError):
    """A pass, or code generation, failed; the message names the pass and the function."""


class ArtifactError(PipelineError):
    """An artifact directory is missing, incomplete, altered, or built for another target."""


class ValidationFailedError(PipelineError):
    """A compiled module disagrees with ONNX Runtime by more than the tolerance."""

    exit_code = 3


class MeasuringBrokenError(PipelineError):
    """The machine cannot build or measure candidates any more; what was measured before is recorded."""


class NothingMeasuredError(PipelineError):
    """A tuning run ended and not one candidate was measured validly."""

    exit_code = 4


class GateRefusedError(PipelineError):
    """A gate says no: a build may not take the place of a baseline. The message names the checks."""

    exit_code = 5


class InterruptedEarlyError(PipelineError):
    """A tuning run was interrupted before anything was measured; no artifact was written."""

    exit_code = 130
