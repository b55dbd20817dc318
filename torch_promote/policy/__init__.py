"""Policies: what autocast does with each op."""
