"""The vocabulary of routing: what a policy is, sees and may do, and how a model selects experts.

Knows ids, weights and scores as NumPy arrays. Must not know llama.cpp, nor how bytes are read.
"""
