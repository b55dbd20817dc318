"""What a trace records: calls.py, a call; groups.py, what calls add up to; trace_records.py, both."""
