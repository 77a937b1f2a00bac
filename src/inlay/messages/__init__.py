"""Messages between rooms and processes: prompts, requests, outputs, cards, commands.

Types, and what follows from them alone: digests, bounds, refusals. They are not sent here
(`inlay.transport`), and a client's JSON has types of its own (`inlay.api.schema`).
"""
