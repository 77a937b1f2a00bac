"""What embeddings out need besides an engine.

How a model says it wants to be used, and a cache of results. No torch.
"""
