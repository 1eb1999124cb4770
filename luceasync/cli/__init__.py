"""Commands of the terminal: serve, chat, plan, doctor. Builds the Config and hands its sections
out.
"""
