"""The program at the other end of a channel: a stage or a drafter in a process of its own.

Owns what such a process is told and does. Knows no request, and not what started it.
"""
