"""The extension `torch_promote._C`: loading it, and packing what it is asked for."""
