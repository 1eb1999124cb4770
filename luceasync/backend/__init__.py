"""A stage of shards in a process of its own, at the other end of a channel.

Owns what such a process is told and does. Knows no request, and not who started it.
"""
