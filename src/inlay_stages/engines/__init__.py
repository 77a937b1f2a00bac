"""Engines of stages, one package each; none imports another's library."""
