"""The meaning of a TIR function: its blocks, contractions, dataflow, index ranges, epilogue and signature."""
