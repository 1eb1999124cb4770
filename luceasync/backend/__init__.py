"""The program at the other end of a channel: runs a stage or a drafter in a separate process.

Owns everything about such a process. Does not know requests, or what started the process.
"""
