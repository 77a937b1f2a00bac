"""Storage of files and batches: memory, a directory, or a fleet's NATS.

`api.Storage` is what they have in common; `contents` cuts files into pieces and seals them.
"""
