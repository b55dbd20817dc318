"""The one door to the extension `torch_promote._C`."""
