"""From the socket to checked rows.

Bytes are counted before they are held, decoded as they arrive, and copied once.
"""
