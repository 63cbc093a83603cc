"""How a kernel is made: target limits, fallback schedules, MetaSchedule space generators."""
