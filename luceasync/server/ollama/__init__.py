"""Ollama's API, for the editors and apps that know no other."""
