"""The ranges of tensors: values.py for `trace`, tensor_ranges.py for extremes, float_bits.py for counting."""
