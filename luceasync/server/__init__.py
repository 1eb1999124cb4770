"""The HTTP server: request bodies in, events out. The engine is passed in; nothing here imports
torch.
"""
