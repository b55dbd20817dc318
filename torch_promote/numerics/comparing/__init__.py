"""`compare`: finds the ops that lose accuracy under a policy, and estimates the effect on the loss."""
