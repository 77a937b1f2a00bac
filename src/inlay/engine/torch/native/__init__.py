"""Loops of our own for what oneDNN and torch do slowly on a CPU, in C++ compiled on the machine that runs them."""

from inlay.engine.torch.native.kernels import DecodeShape, Kernels, Panels, kernels

__all__ = ["DecodeShape", "Kernels", "Panels", "kernels"]
