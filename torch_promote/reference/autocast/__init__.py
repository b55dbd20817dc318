"""What autocast does with a call: the plan, the state, the arguments."""
