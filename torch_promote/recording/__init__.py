"""What a block has run: calls, values, states, and the file that holds them."""
