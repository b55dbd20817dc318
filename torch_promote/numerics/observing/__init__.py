"""Makes the record of a call: tracer.py observes calls, the other files find where a call came from, and its policy."""
