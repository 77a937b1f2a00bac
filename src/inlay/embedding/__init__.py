"""What embeddings out need besides an engine: how a model says it wants to be used, and a cache of results. No torch."""
