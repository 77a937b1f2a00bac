"""Cohere's routes, as its clients ask them: vectors of texts in several types at once."""
