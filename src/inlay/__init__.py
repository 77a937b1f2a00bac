"""Serve language models whose prompts may be embeddings, behind one OpenAI-compatible API.

The core: prompts in, tokens or vectors out. What makes other things, or studies or drives a server
from outside, is an extension beside it (`inlay.extension`).
"""

__version__ = "0.2.0"
