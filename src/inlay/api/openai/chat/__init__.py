"""`POST /v1/chat/completions`: the route, and the form of its answer.

What is computed is `inlay.api.generation`'s; types are in `inlay.api.openai.schema.chat`.
"""
