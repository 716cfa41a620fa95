"""Compares ways to run a model, each run in a process of its own, and judges whether they differ.

Knows processes, the machine's state and statistics. Must not load a model itself, nor know what a
setting does: a cell is a command, and a run is the report that it wrote.
"""
