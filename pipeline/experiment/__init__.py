"""One way to say that something is faster: arms that take turns, an interval for their ratio, a verdict."""
