"""luceasync: a local LLM server that prefills a prompt once."""

__version__ = "0.1.0"
