"""Tuning: from lowered modules to tasks, and from tasks to measured records."""
