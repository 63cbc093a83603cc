"""What a TIR function means: its blocks, contractions, dataflow, index ranges, epilogue and signature."""
