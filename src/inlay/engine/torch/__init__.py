"""The built-in engine: transformers models over paged attention, with continuous batching of tokens, rows and both."""
