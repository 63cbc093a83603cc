"""What a tuning run does next: rounds, tasks and their state, baselines, finals, resuming."""
