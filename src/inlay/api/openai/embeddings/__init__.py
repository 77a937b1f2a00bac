"""Embeddings, pooling, classification, scores and ranks.

`inputs` makes prompts of texts in chunks, off the event loop, while the engine computes the chunks
before. `gathering.Gathering` looks each prompt up in the frontend's result cache by a digest of its
positions, the weights, the adapter and the salt, sends the missing ones to the least loaded worker,
and returns the vectors in order. A cache hit costs neither a message nor a worker.

Workers send vectors as the model gives them; the frontend normalises and shortens them, so that one
cached result serves all options.
"""
