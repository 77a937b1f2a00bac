"""Attention over pages of keys and values: one interface, and a way for each device."""
