"""How the model and the soft prompt in `inlay.demo` are made.

An invented world, a corpus about it, and training.
"""
