"""`promotion`: regions in which ops promote their operands by a rule of the user's choice."""
