"""`my_autocast`, the base class that it shares with `promotion`, and defaults for a whole program."""
