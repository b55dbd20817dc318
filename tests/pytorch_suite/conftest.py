"""`make test-pytorch`. The folder holds no tests of ours; `tests/test_pytorch_suite.py` tests it."""

collect_ignore_glob = ["*.py"]
