"""The dispatch key of the package's kernels."""

__all__ = ["AUTOCAST_KEY"]

#: The only Autocast key above AutocastCPU and AutocastCUDA. PyTorch itself has no kernels on it.
AUTOCAST_KEY = "AutocastPrivateUse1"
