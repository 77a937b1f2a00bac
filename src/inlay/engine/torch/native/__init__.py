"""C++ kernels for operations that torch and oneDNN do slowly on a CPU, compiled on first use.

`build.py` compiles a source for this CPU and caches the library; `kernels.py` calls it with
tensors. Without a compiler, torch's own operators are used.
"""

from inlay.engine.torch.native.kernels import (
    ALL_ROWS,
    AttentionShape,
    Codes,
    Kernels,
    PageTable,
    Panels,
    kernels,
)

__all__ = ["ALL_ROWS", "AttentionShape", "Codes", "Kernels", "PageTable", "Panels", "kernels"]
