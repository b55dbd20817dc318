"""tune: the smallest set of overrides that meets a tolerance."""
