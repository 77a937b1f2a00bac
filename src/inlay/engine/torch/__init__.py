"""The built-in engine.

Transformers models over paged attention, with continuous batching of tokens, rows and both.
"""
