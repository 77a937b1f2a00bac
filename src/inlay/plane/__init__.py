"""Carries works to workers and outputs back; knows nothing of HTTP, models or engines."""
