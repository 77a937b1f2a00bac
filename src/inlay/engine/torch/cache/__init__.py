"""Bookkeeping of KV pages: free, used, cached. Pure Python: `attention.pages` has the tensors.

Which page a sequence gets next is the scheduler's choice; pages from elsewhere are `pages`'.
"""
