"""A store of artifacts by content, tags that move, and what can be made again from what is known."""
