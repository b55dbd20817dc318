"""`make fuzz`: random training programs under stock autocast and under ours, compared bit for bit.

A program is a tree of statements (`tree`), which is drawn from a seed and written as Python (`drawing`). All
draws are made before anything runs, so both kinds of regions run the same source. A program is correct under stock:
`rules` keeps out what docs/differences.md lists.

    tree: statements, their kinds, and the walk that writes and checks a program.
    rules: what a program may do at a place, such as write to a weight that no cast in the cache depends on.
    ops: statements that compute.
    statements: the others: losses, changes of weights, regions and other blocks, CUDA graphs.
    drawing: draws a program, and writes it as Python.
    calls: what the source of a program calls.
    running: runs a program under both kinds of regions, and compares.
    shrinking: makes a failing program smaller.
    workers: runs many programs in processes, and survives crashes.
    report: counts, and what the command prints.
    planted: bugs for the tests to plant.
"""
