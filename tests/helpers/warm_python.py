"""A process that has imported torch and runs each program in a fork of itself; helpers.subprocesses starts it.

Its arguments are the number of a socket on which it listens, and the names of more modules to import:
`module:function` also calls one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import types
import warnings
from typing import Any, NoReturn

gc.disable()  # until all is imported

import torch  # noqa: E402, F401  # for the programs: what a process would spend two seconds on


def next_program(listening: socket.socket) -> tuple[str, bool]:
    """Starts programs until every process that has connected is gone. Returns once in each fork."""
    connected: list[socket.socket] = []
    while True:
        [requests, *_], _, _ = select.select([listening, *connected], [], [])
        if requests is listening:
            connected.append(listening.accept()[0])
            continue
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            connected.remove(requests)
            requests.close()
            if not connected:
                while end_of_a_child():  # what the last have used counts as this process's, too
                    pass
                os._exit(0)
            continue
        while end_of_a_child():
            pass
        out, err, status = files
        if os.fork() == 0:
            program = os.fork()
            if program == 0:
                for each in (listening, *connected):
                    each.close()
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


def prepared(request: dict[str, Any], out: int, err: int) -> tuple[str, bool]:
    """Makes this process look like `python -c CODE ARGUMENTS`, and returns what `next_program` does."""
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
    return str(request["code"]), bool(request["finalize"])


def end(status: int) -> NoReturn:
    """Ends the process as multiprocessing ends its own: without finalizing Python, which writes to most shared pages.

    Finalizing takes 0.2 seconds, and 0.4 after an import of Dynamo.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            with contextlib.suppress(Exception):  # of a program that calls it, it is the error to show
                getattr(imported, function)()
    # A fork shares the memory of PyTorch's objects until it writes there. The garbage collector would, at the latest
    # when the fork ends: that takes half a second.
    gc.collect()
    gc.freeze()
    gc.enable()
    code, finalize = next_program(socket.socket(fileno=int(sys.argv[1])))
    # No variable here holds the module: it would outlive those that the program imports.
    sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as exiting:
        if finalize or not isinstance(exiting.code, int | None):
            raise
        status = exiting.code or 0
    if not finalize:  # other exceptions are Python's to show
        end(status)
