"""OpenAI's Responses API: items in, items out, as its clients know them. Nothing is stored."""
