"""Which pages there are, whose they are, and which digest is in which. No tensors."""
