"""Makes the record of a call: tracer.py observes calls, the other files find the origin of a call and its policy."""
