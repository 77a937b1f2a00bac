"""Shared by every room, of which it knows none: errors, clocks, queues, caches, slots.

No part of a request and no setting: those have rooms of their own.
"""
