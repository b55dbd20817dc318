"""Keeps pytest to the test: the rest of the folder is `make tuned-models`."""

collect_ignore_glob = ["[!t]*.py"]
