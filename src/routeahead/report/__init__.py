"""A page of recorded runs: what their reports and traces show, side by side.

Knows files that runs have written. Must not know how a model is run.
"""
