"""Keeps pytest out: tests/test_soak.py tests this folder."""

collect_ignore_glob = ["*"]
