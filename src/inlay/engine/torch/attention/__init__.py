"""Attention over pages of keys and values: one interface, one implementation per device.

`paged.py` defines the interface (`PagedAttention`, `Scoring`) and plugs it into transformers;
`pages.py` holds the tensors, `layers.py` finds the shape of each attention layer. Implementations:
`gathered.py` (any device, any scoring), `native.py` (C++ kernels on a CPU), `cuda.py` (a Triton
kernel, `triton_kernels.py`, and `triton_layers.py` for what comes before it); `choice.py` selects
one for a batch. `recurrent.py` is for layers that keep a state in place of keys and values.
"""
