"""compare: which ops lose accuracy under a policy, and what that does to the loss."""
