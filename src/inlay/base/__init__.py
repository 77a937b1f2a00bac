"""Shared by every room, of which it knows none: errors, clocks, queues, memory."""
