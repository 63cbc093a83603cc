"""Rules of our MetaSchedule search spaces, one a file."""
