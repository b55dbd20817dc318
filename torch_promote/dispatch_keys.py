"""The dispatch key that the package registers its kernels on."""

__all__ = ["AUTOCAST_KEY"]

#: The only Autocast key above AutocastCPU and AutocastCUDA; empty in core.
AUTOCAST_KEY = "AutocastPrivateUse1"
