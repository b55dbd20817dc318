"""Keeps pytest to the tests: the rest of the folder is `make fuzz`."""

collect_ignore_glob = ["[!t]*.py", "tree.py"]
