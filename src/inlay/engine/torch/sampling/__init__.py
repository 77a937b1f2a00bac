"""Sampling: logits to token ids and logprobs.

`Sampler` (`sampler.py`) runs all steps; `draws.py` ranks tokens and draws from truncated
distributions; `constraints.py` masks forbidden tokens, `sampler.py` counts tokens for
penalties, `thinking.py` enforces thinking budgets. Randomness is a function of (seed, output index)
only.
"""
