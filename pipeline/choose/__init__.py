"""The choice of a kernel for each function: look-up of records, selection, and variants tried inside the model."""
