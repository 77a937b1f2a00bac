"""Completions and chats.

From what a request says to requests, and from their outputs to what clients are shown.
"""
