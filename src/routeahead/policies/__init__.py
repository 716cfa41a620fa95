"""The built-in policies, one a file, each with its settings, its hooks and its report.

Knows routings as NumPy arrays. Must not know ctypes, threads or where bytes lie.
"""
