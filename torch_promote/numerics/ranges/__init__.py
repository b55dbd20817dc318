"""The ranges of tensors: values.py, those that `trace` records; tensor_ranges.py, extremes; float_bits.py, counting."""
