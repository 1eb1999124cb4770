"""Speculation: a DFlash drafter proposes, the target decides, and the text stays the target's."""
