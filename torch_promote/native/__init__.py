"""The extension `torch_promote._C`: loading it, and encoding regions and policy changes for it."""
