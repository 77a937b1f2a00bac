"""Embeddings in files: one checked reader for three formats, casts, checks and writers. No torch.

    read(data, *, limits: ReadLimits) -> Tensor
        bytes of a file by torch.save, safetensors or numpy to one checked, contiguous tensor
    prompts_of(tensor, *, max_prompts) -> list[Tensor]
        (n, h), (1, n, h) or (b, n, h) to two-dimensional ones
    to_rows(tensor, *, hidden_size, dtype, max_abs, table_id) -> Rows
        cast, with finite values, magnitude and embedding table checked; no digests
    write(array, format, *, table_id=None) -> bytes

Reading is a security boundary: the bytes come from strangers. Nothing here executes, inflates or
trusts a length before it is checked against the bytes that are really there.
"""

from inlay.tensors.reader import read, write
from inlay.tensors.rows import ModelDType, prompts_of, to_rows
from inlay.tensors.tensor import ReadLimits, Tensor, TensorFormat, check_size

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
