"""What clients say and hear: OpenAI's requests and responses as msgspec structs.

Unknown fields are ignored, null is as good as absent, booleans are not integers. Structs hold what
was said; whether it makes sense for a model is decided in `inlay.frontend`.
"""
