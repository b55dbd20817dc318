"""`why`: explains the dtype of an expression, step by step.

- expression: the parser; nodes: the parts of an expression; operators: the table of operators
- step_writer: evaluates an expression and writes the steps; derivation: the steps by PyTorch's rule, and `why`
- states_in_words: the steps that promote operands; overflow: what happens to values that do not fit
- rule_step_writer: the steps by another promotion rule

These explain operators. torch_promote.checking.why adds calls of functions, and autocast.
"""

from torch_promote.reference.derivation.derivation import Derivation, why

__all__ = ["Derivation", "why"]
