"""Parity: runs PyTorch's own samples under stock autocast and under ours, and compares both with the reference."""
