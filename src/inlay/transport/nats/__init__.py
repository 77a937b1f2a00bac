"""NATS in a fleet: cards, heartbeats, cache events, loads and stored prompts.

Importing this imports no client of NATS: `member`, `frontend` and `worker` do.
"""
