"""SGLang behind inlay's own protocols: text, ids, rows and mixtures through its engine, guarded against what would harm it."""
