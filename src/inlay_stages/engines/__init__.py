"""Engines of stages, one package each: diffusers, vLLM-Omni, speech. None imports another's library."""
