"""Ollama's API, for editors and apps that support no other."""
