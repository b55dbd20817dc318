"""Loads the extension `torch_promote._C`, and encodes regions and policy changes for it."""
