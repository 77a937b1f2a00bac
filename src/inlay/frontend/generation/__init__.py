"""Completions and chats: from what a request says to works, and from their deltas to what clients are shown."""
