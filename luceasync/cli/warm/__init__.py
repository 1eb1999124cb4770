"""The warm command: have prompts computed and kept before a client asks."""
