"""Fits routers to earlier hidden vectors: moments of a text, ridge regression, held-out agreement.

Knows what a policy sees of a running model. Must not know how experts are read.
"""
