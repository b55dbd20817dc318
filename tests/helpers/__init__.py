"""What test files of several rooms share. A helper that one room needs stands in that room."""
