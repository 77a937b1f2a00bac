"""The plane of many machines: works, streams and cards ride on NATS.

Importing this imports no client of NATS: `member`, `frontend` and `worker` do.
"""
