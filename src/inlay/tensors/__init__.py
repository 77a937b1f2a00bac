"""Embeddings in files.

One checked reader for three formats, casts, checks, and the writers clients use. No torch.

Reading is a security boundary: container bytes come from strangers, so nothing here executes,
inflates or trusts a length before it is checked against what is really there.
"""

from inlay.tensors.reader import read
from inlay.tensors.rows import ModelDType, prompts_of, to_rows
from inlay.tensors.tensor import ReadLimits, Tensor, TensorFormat, check_size
from inlay.tensors.writer import write

__all__ = [
    "ModelDType",
    "ReadLimits",
    "Tensor",
    "TensorFormat",
    "check_size",
    "prompts_of",
    "read",
    "to_rows",
    "write",
]
