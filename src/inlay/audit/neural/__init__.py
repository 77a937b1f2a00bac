"""Attackers, transforms and answers that compute with networks. Everything here needs torch.

language_model.py           the whole model
model_answers.py            its answers to rows, and how far they drift
inverter.py                 an attacker that is trained on the transform
beam.py, search.py          attackers that have the model's weights
hidden.py, learned.py       transforms: a layer's states; a network trained against an inverter
"""
