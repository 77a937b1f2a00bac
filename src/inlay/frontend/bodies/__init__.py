"""From the socket to checked rows: bytes are counted before they are held, decoded as they arrive, and copied once."""
