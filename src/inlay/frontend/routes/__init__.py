"""Routes that run no model: models, adapters, stored prompts, tokens, health, admin, pages."""
