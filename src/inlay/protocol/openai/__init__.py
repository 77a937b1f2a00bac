"""What clients say and hear: the OpenAI shapes, extended where they say nothing."""
