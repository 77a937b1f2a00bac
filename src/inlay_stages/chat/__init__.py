"""Chats of pipelines: models in a row, and an image or a sound behind the text.

The text itself is that of every chat (`inlay.api.generation`).
"""
