"""Storage of files and batches: memory, a directory, or a fleet's NATS.

Each is an `inlay.store.shared.Storage`; `contents` cuts files into pieces and seals them.
"""
