"""Bookkeeping of KV pages: free, used, cached. Pure Python, no tensors."""
