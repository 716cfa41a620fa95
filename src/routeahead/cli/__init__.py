"""The commands: a thin file for each verb, and the options that several share.

Knows how settings are typed and how results are shown. Must not decide anything that the Python API
does not decide as well.
"""
