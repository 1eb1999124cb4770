"""The warm command: has prompts computed and kept before a client sends them."""
