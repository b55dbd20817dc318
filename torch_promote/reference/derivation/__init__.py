"""`why`: explains the dtype of an expression, step by step.

- expression: the parser; operators: the table of operators
- step_writer: evaluates an expression and writes the steps; derivation: the steps by PyTorch's rule, and `why`
- rule_step_writer: the steps by another promotion rule
"""

from torch_promote.reference.derivation.derivation import Derivation, why

__all__ = ["Derivation", "why"]
