"""Hooks into the rest of PyTorch (compile, checkpoint, export, optimizers, higher-order operators) and into asyncio."""
