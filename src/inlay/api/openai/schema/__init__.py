"""OpenAI's requests and responses, vLLM's fields included, as msgspec structs.

One module for each route or family of routes. Unknown fields are ignored, null is treated as
absent, and a boolean is never taken for an integer. A struct holds the request as it was sent; the
routes check it against the model and the settings. Fields that are known and not served are
declared as `Unserved` (`unserved.py`) and refused.
"""
