"""The one supervisor of child processes: start, deadline, memory, one retry for the machine's faults."""
