"""The routes beside those that run a model.

Models, adapters, stored prompts, tokens, health, operations, pages.
"""
