"""The bytes of experts: files, offsets, pages, the lanes that read, and the cache of what stays.

Knows layers, experts and projections as numbers. Must not know what a router is, nor llama.cpp; of
the package it imports only `errors` and `types`, so that it can be tested without a model.
"""
