"""The command `torch-promote`, before its imports.

`import torch` takes seconds. This module does not import it at its top, so that Ctrl-C in that time ends the command
without a traceback, as it does later.
"""

import os
import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Runs the command line of the process.

    Returns:
        The exit status of torch_promote.cli.program.main; also 2 for an environment variable or an extension with which
        torch_promote cannot be imported. Ctrl-C during the imports ends the process with 130.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # nohup ignores it
        # Not KeyboardInterrupt: code that runs during the imports catches it, and the command would go on.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    try:
        from torch_promote.cli import program
    except Exception as error:
        if type(error).__module__ != "torch_promote.errors":
            raise
        sys.stderr.write(f"torch-promote: error: {error}\n")
        return 2
    finally:
        signal.signal(signal.SIGINT, before)
    return program.main()
