"""The command `torch-promote`."""
