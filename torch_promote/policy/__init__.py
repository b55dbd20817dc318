"""What is done with each op: the op table, cast policies, overrides, and `Policy`, the value that holds them."""
