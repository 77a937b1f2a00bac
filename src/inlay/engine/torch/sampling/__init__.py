"""Sampling: logits to token ids and logprobs.

`TokenSampler` (`token_sampler.py`) samples a step, `TokenChooser` with the masks of grammars,
`Sampler` (`sampler.py`) from logits; `sequence.is_plain` says where the likeliest token is enough;
`draws.py` ranks tokens and draws from truncated distributions; `constraints.py` masks forbidden
tokens, `sampler.py` counts tokens for penalties, `thinking.py` enforces thinking budgets.
Randomness is a function of (seed, output index) only.
"""
