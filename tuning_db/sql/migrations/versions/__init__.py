"""One module for the schema of each released version that changed it; a released one is never edited."""
