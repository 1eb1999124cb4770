"""Speculation: drafters propose, the target decides, and the text stays the target's."""
