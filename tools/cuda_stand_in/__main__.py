"""Runs a program, a module (-m) or code (-c) in this process, which has the stand-in."""

from __future__ import annotations

import runpy
import sys

import cuda_stand_in


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments in (["-m"], ["-c"]):
        raise SystemExit("usage: python -m cuda_stand_in (PROGRAM | -m MODULE | -c CODE) [ARGUMENT ...]")
    if reason := cuda_stand_in.why_not():
        print(reason, file=sys.stderr)
        raise SystemExit(2)
    cuda_stand_in.start()
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
