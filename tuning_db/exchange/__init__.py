"""Records between databases: archives, merging, pruning, MetaSchedule's JSON files."""
