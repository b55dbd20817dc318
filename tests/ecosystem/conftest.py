"""Keeps pytest out: this folder holds programs of frameworks that the suite's environment lacks."""

collect_ignore_glob = ["*"]
