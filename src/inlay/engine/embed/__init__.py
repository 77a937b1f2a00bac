"""Embeddings and scores with transformers models: encoders and decoders, packed without padding."""
