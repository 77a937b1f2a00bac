"""Who asks, and how much of the server is theirs."""
