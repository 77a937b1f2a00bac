"""SGLang behind inlay's own protocols.

Text, ids, rows and mixtures through its engine, guarded against what would harm it.
"""
