"""Which kernel each function gets: look-up of records, selection, and variants tried inside the model."""
