"""Shared by the forms of all reports: page template, style, tree, charts, numbers, files."""
