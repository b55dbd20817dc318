"""A process that has imported torch and runs each program in a fork of itself; helpers.subprocesses starts it."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import socket
import struct
import sys
import types
import warnings
from typing import Any

import torch  # noqa: F401  # for the programs: what a process would spend two seconds on


def next_program(requests: socket.socket) -> str:
    """Starts programs until the other end is closed. Returns once in each fork, with the code to run there."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            os._exit(0)
        while end_of_a_child():
            pass
        out, err, status = files
        if os.fork() == 0:
            program = os.fork()
            if program == 0:
                requests.close()
                os.close(status)
                return prepared(json.loads(message), out, err)
            os.write(status, struct.pack("i", program))
            os.write(status, struct.pack("i", os.waitpid(program, 0)[1]))
            os._exit(0)
        for file in files:
            os.close(file)


def paths_of_the_environment() -> list[str]:
    return list(dict.fromkeys(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))


def end_of_a_child() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def prepared(request: dict[str, Any], out: int, err: int) -> str:
    """Makes this process look like `python -c CODE ARGUMENTS`, and returns the code."""
    os.chdir(request["folder"])
    mine = paths_of_the_environment()
    os.environ.clear()
    os.environ.update(request["env"])
    for file, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(file, standard)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *request["arguments"]]
    sys.path[:] = ["", *paths_of_the_environment(), *(path for path in sys.path[1:] if path not in mine)]
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)  # noqa: SIM115
    if request["quiet"]:
        warnings.simplefilter("ignore")
    return str(request["code"])


if __name__ == "__main__":
    # A fork shares the memory of PyTorch's objects until it writes there. The garbage collector would, at the latest
    # when the fork ends: that takes half a second.
    gc.collect()
    gc.freeze()
    code = next_program(socket.socket(fileno=int(sys.argv[1])))
    # No variable here holds the module: it would outlive those that the program imports.
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
