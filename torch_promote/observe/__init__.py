"""One observer of the calls of ops, its events, and recordings of them."""
