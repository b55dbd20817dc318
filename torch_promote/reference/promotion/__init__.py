"""PyTorch's promotion: of two dtypes (table), of operands (states), and which casts are allowed (casting)."""
