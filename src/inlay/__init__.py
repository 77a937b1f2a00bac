"""Serve language models whose prompts may be embeddings, behind one OpenAI-compatible API."""

__version__ = "0.2.0"
