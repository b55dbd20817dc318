"""The command `torch-promote`.

program.py is the entry point, and each command is a module with its name. They share output.py (printing),
user_program.py (running a Python program) and target.py (a function that returns a model and a step).
"""
