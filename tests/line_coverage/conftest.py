"""Keeps pytest out: this folder is `make coverage`."""

collect_ignore_glob = ["*"]
