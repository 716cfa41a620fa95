"""What a run counts and records: counters, traces, and the files that they are written to.

Knows `experts` (layouts, records of reads). Must not import the engine, the policies or llama.cpp:
they report to it.
"""
