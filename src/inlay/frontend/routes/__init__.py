"""The routes beside those that run a model: models, adapters, stored prompts, tokens, health, operations, pages."""
