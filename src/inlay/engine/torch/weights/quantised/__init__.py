"""Checkpoints with weights of four or eight bits.

`scheme.py` reads what `config.json` says of them, without torch; `formats.py` finds the weights in
the files and reads them; `weight.py` is what all formats become; `reading.py` hands them to
transformers as it loads a model.
"""
