"""The machine: what memory and processors this process may use.

Knows psutil, /proc and control groups.
Must not know models.
"""
