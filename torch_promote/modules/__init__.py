"""Policies of modules."""
