"""OpenAI's requests and responses, vLLM's fields included; see `inlay.api.schema`.

One module for each route or family of routes.
"""
