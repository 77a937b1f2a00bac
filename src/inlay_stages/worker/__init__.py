"""The part of a worker that keeps payloads for other stages and fetches theirs."""
