"""The records of a trace: calls (calls.py), sums over calls (groups.py), and both together (trace_records.py)."""
