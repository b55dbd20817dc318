"""`autocast_plan`: what autocast does with a call (plan), in a given state (state), to its arguments (arguments)."""
