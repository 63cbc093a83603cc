"""`relaxtune db`: one file a group of commands."""
