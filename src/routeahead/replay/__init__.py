"""Replays a recorded routing through a cache and through a model of a machine.

Knows routing traces and the engine's own cache. Must not import the engine or llama.cpp: a replay
needs no model, no disk and no ctypes.
"""
