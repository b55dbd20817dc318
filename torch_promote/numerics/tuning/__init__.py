"""`tune`: finds the smallest set of overrides that meets a tolerance."""
