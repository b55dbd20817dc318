"""The op rules: a table of overloads in `.rules` files, and the few functions that its lines name."""
