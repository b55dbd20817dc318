"""What several test files share; each module says what it has. Test files do not import from each other."""
