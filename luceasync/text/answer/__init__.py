"""What a model's answer says, as typed pieces: reasoning, text, calls of tools.

Text that grows goes in; pieces come out as soon as they are certain. Knows no tokens and no API.
"""
