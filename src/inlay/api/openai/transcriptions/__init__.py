"""`/v1/audio/transcriptions` and `/v1/audio/translations`: chats with a piece of sound each."""
