"""Chats of pipelines: models in a row, and an image or a sound behind the text."""
