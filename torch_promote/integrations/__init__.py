"""What the package tells the rest of PyTorch, or asks of it."""
