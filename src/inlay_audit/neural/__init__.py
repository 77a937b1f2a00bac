"""Attackers, transforms and answers that compute with networks. Everything here needs torch.

language_model.py           the whole model; its answers to rows, and how far they drift; a
                            transform: the states of one of its layers
inverter.py                 an attacker that is trained on the transform
beam.py, search.py          attackers that have the model's weights
learned.py                  a transform: a network trained against an inverter
"""
