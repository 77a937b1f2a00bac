"""Messages between rooms and processes: prompts, requests, outputs, cards."""
