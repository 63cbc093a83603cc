"""One module a revision, in order; a released one is never edited."""
