"""vLLM behind inlay's own protocol: text, ids, rows and mixtures through its asynchronous engine, guarded against what would harm it."""
