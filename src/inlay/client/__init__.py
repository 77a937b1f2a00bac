"""Prompt embeddings for clients: made without torch, sent with the `openai` client.

    embedder = PromptEmbedder.from_pretrained("model directory")
    client.completions.create(model="m", **embedder.completion_args("Tell me more."))

`PromptEmbedder` needs only the tokenizer and the embedding table of a model's directory.
`EmbeddedPrompt` and `SoftPrompt` are rows with the arguments that requests need. `image_part` is an
image in a message; `ImageEncoder` has a server make its rows, an `EmbeddedImage`. `Uploader` stores
rows and images on a server, to be used by reference, and `AsyncUploader` does so in an event loop.
`nearest` finds the tokens nearest to rows.
"""

from inlay.client.embedder import PromptEmbedder
from inlay.client.images import EmbeddedImage, ImageEncoder, image_part, load_image
from inlay.client.prompts import EmbeddedPrompt, SoftPrompt, load, loads
from inlay.client.uploader import AsyncUploader, StoredEmbeds, StoredImage, Uploader
from inlay.tensors.neighbours import Neighbour, nearest

__all__ = [
    "AsyncUploader",
    "EmbeddedImage",
    "EmbeddedPrompt",
    "ImageEncoder",
    "Neighbour",
    "PromptEmbedder",
    "SoftPrompt",
    "StoredEmbeds",
    "StoredImage",
    "Uploader",
    "image_part",
    "load",
    "load_image",
    "loads",
    "nearest",
]
