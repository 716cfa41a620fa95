"""Grades settings against a baseline: text, exact answers and long generations.

Knows the model as a `Llama` that takes settings and gives logits. Must not know how its experts are
routed or read: a setting is judged by its output and its counters.
"""
