"""The database itself: engines, schema, migrations, statements, transactions, rows."""
