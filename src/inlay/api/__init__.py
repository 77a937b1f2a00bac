"""Request and response types of the APIs that clients use.

`openai` has the types of OpenAI's API, of vLLM's additions to it, and of inlay's own routes.
Nothing here imports another room but the shared types (`inlay.errors`, `inlay.card`).
"""
