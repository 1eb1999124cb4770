"""Parses a model's answer into typed pieces: reasoning, text, tool calls.

Text goes in as it is generated; pieces come out as soon as they are final. Independent of tokens
and APIs.
"""
