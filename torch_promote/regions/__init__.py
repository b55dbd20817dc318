"""`my_autocast`, the base that it shares with `promotion`, and defaults for a whole program."""
