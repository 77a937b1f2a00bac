"""Carries works to workers and deltas back; knows nothing of HTTP, models or engines."""
