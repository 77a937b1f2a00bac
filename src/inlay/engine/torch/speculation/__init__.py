"""Speculative decoding: next tokens are guessed, and computed in one step.

The output is the same with and without: each position is sampled from its own logits with the
output so far, and a draft is accepted when the sampled id equals it. For a draft without
probabilities of its own that accepts as often as rejection sampling does.
"""

from inlay.engine.torch.speculation.speculator import SpeculationCounts, Speculator

__all__ = ["SpeculationCounts", "Speculator"]
