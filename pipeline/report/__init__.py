"""The report on an artifact: where the time goes, kernel by kernel, as a page, a table or JSON."""
