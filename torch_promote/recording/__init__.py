"""What a block has run: calls, values, states, and the file that holds them."""

#: How the names of recordings end.
SUFFIX = ".jsonl.gz"
