"""Prompt embeddings for clients: made without torch, sent with the `openai` client.

    embedder = PromptEmbedder.from_pretrained("model directory")
    client.completions.create(model="m", **embedder.completion_args("Tell me more."))

`PromptEmbedder` needs only the tokenizer and the embedding table of a model's directory.
`EmbeddedPrompt` and `SoftPrompt` are rows with the arguments that requests need. `Uploader` stores
them on a server, to be used by reference. `nearest` finds the tokens nearest to rows.
"""

from inlay.client.embedder import PromptEmbedder
from inlay.client.neighbours import Neighbour, nearest
from inlay.client.prompts import EmbeddedPrompt, SoftPrompt, load, loads
from inlay.client.uploader import StoredEmbeds, Uploader

__all__ = [
    "EmbeddedPrompt",
    "Neighbour",
    "PromptEmbedder",
    "SoftPrompt",
    "StoredEmbeds",
    "Uploader",
    "load",
    "loads",
    "nearest",
]
