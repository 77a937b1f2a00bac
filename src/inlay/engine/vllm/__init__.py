"""vLLM behind inlay's own protocol.

Text, ids, rows and mixtures through its asynchronous engine, guarded against what would harm it.
"""
