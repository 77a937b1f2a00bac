"""Prompt embeddings for clients: made without torch, sent with the `openai` client.

    embedder = PromptEmbedder.from_pretrained("model directory")
    client.completions.create(model="m", **embedder.completion_args("Tell me more."))

`PromptEmbedder` needs only the tokenizer and the embedding table of a model's directory.
`EmbeddedPrompt` and `SoftPrompt` are rows with the arguments that requests need. `image_part` and
`audio_part` are a file in a message; `MediaEncoder` has a server make its rows, an `EmbeddedMedia`.
`Uploader` stores rows and images on a server, to be used by reference, and `AsyncUploader` does so
in an event loop. `hidden_states` and `read_vectors` read those of an answer. `nearest` finds the
tokens nearest to rows.
"""

from inlay.client.embedder import PromptEmbedder
from inlay.client.hidden_states import HiddenStates, hidden_states
from inlay.client.media import EmbeddedMedia, MediaEncoder, audio_part, image_part, load_media
from inlay.client.prompts import EmbeddedPrompt, SoftPrompt, load, loads
from inlay.client.uploader import (
    AsyncUploader,
    StoredEmbeds,
    StoredImage,
    StoredVectors,
    Uploader,
)
from inlay.client.vectors import SparseWeights, Vectors, read_vectors
from inlay.tensors.neighbours import Neighbour, nearest

__all__ = [
    "AsyncUploader",
    "EmbeddedMedia",
    "EmbeddedPrompt",
    "HiddenStates",
    "MediaEncoder",
    "Neighbour",
    "PromptEmbedder",
    "SoftPrompt",
    "SparseWeights",
    "StoredEmbeds",
    "StoredImage",
    "StoredVectors",
    "Uploader",
    "Vectors",
    "audio_part",
    "hidden_states",
    "image_part",
    "load",
    "load_media",
    "loads",
    "nearest",
    "read_vectors",
]
