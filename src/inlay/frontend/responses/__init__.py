"""OpenAI's Responses: a chat in other words."""
