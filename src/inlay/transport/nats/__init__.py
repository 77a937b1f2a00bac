"""The plane of many machines: requests, streams and cards ride on NATS.

Importing this imports no client of NATS: `member`, `frontend` and `worker` do.
"""
