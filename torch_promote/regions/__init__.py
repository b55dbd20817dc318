"""`my_autocast`, what it is given, and what holds for a whole program."""
