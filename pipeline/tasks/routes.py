"""Routes that make kernels by default."""

from __future__ import annotations

from relaxtune.tuning_db.records import Route

# A vendor's library is asked for by name: an artifact made with it needs it where it runs.
DEFAULT_ROUTES = frozenset(Route) - {Route.LIBRARY}
