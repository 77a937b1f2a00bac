"""Storage of what clients keep beside prompts: memory, a directory, or a fleet's NATS.

Each is an `inlay.store.shared.Storage`; `contents` cuts what is kept into pieces and seals them,
`lease` has records that one process owns.
"""
