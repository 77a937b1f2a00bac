"""Routes of kept responses and conversations."""
