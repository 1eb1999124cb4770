"""Schemas of the kinds that JSONSchemaBench has, and a plain reading of what they say."""
