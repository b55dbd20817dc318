"""`why`: how a result dtype comes about, in words."""

from torch_promote.reference.derivation.derivation import Derivation, why

__all__ = ["Derivation", "why"]
