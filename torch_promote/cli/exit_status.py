"""The exit statuses of the commands. 0: done; 1: a command found something."""

__all__ = ["INTERRUPTED", "WRONG_COMMAND_LINE"]

WRONG_COMMAND_LINE = 2
INTERRUPTED = 130
