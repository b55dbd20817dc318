"""The observer of the calls of ops: the record of a call, where it ran, and who set its policy."""
