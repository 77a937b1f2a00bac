"""Embeddings and scores with transformers models, encoders and decoders, without padding.

`EmbedEngine` (`engine.py`) implements `Engine`: the event loop owns the queue
(`BatchQueue`, pure Python, fair to small requests) and gives batches to an `EmbeddingModel`
(`vector_model.py`). That is a `LocalModel` (an `Encoder` in a thread), or an adapter of vLLM or
SGLang, which use the same queue.

`Encoder` runs a transformers model over prompts laid end to end; `PackedAttention` attends groups
of about equal length behind transformers' attention interface; `NativeEncoder` runs all layers of a
BERT-like encoder in one native call on CPUs with AMX or AVX-512; `pooling.py` computes vectors from
hidden states in float32. `families.py` lists the supported models, all others are refused;
`facts.py` holds what does not depend on the engine: pooling, length and identity.

Invariants: a vector does not depend on the rest of its batch, and each optimisation is compared
with the module it replaces before it is used.
"""
