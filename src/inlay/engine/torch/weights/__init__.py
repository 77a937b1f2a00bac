"""Loading of checkpoints as transformers models, with faster modules.

`families.py` lists the supported models, `checkpoint.py` loads one, `block_fp8.py` dequantises fp8
weights while they are read, `progress.py` logs the progress. `linear.py` and `fused.py` replace
modules by faster ones; each replacement is compared with the original first.
"""
