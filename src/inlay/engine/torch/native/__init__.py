"""C++ kernels for operations that torch and oneDNN do slowly on a CPU, compiled on first use.

`build.py` compiles a source for this CPU and caches the library; `kernels.py` and `products.py`
call it with tensors. Without a compiler, torch's own operators are used.
"""

from inlay.engine.torch.native.kernels import AttentionShape, Kernels, kernels
from inlay.engine.torch.native.products import ALL_ROWS, PackedWeight, Panels, Products

__all__ = [
    "ALL_ROWS",
    "AttentionShape",
    "Kernels",
    "PackedWeight",
    "Panels",
    "Products",
    "kernels",
]
