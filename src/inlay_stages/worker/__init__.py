"""The part of a worker that keeps payloads for other stages and fetches theirs.

Which stage gets what is decided in the frontend (`inlay_stages.walk`).
"""
