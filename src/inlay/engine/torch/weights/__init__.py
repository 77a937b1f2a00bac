"""Loading of checkpoints as transformers models, with faster modules.

`families.py` lists the supported models, `checkpoint.py` loads one, `quantised` reads weights of
four or eight bits. `linear.py`, `linear_methods.py` and `fused.py` replace modules by faster ones;
each replacement is compared with the original first.
"""
