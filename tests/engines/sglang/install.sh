#!/usr/bin/env bash
# Fill the environment $VENV with SGLang as far as a CPU needs it, what a worker needs of inlay, and the tests' libraries. Run from the
# repository root.
#
# SGLang's package is made for CUDA: its requirements bring gigabytes of kernels that no CPU runs. What the modules it imports at its start
# need is installed, the rest is left out; hence its wheel is installed without requirements, and those it names are read from it. The
# kernels for a CPU are not on PyPI: what only speculative decoding, AMX and Qwen3.5 would call is stood in for by functions that raise.
# NIXL moves keys and values between two SGLangs; its packages for CUDA bring UCX, which goes over TCP.
set -euo pipefail

suite=$(dirname "${BASH_SOURCE[0]}")
python="$VENV/bin/python"
install() { "$UV" pip install --quiet --python "$python" --constraint "$suite/constraints.txt" "$@"; }

install torch
install --no-deps triton torchvision nixl nixl-cu12 sglang
"$python" - > "$VENV/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

LEFT_OUT = (
    "torch|torchvision|torchaudio|torchcodec|torch_memory_saver|timm|cuda-python|flash-attn-4|flashinfer_python|humming-kernels|nvidia-.*|"
    "nvshmem4py.*|quack-kernels|sgl-.*|sglang-kernel|tilelang|smg-grpc-servicer|tml-renderers|deepseek-recipe|py-spy|build"
)
for line in importlib.metadata.requires("sglang"):
    if "extra ==" not in line and not re.match(rf"({LEFT_OUT})(?![\w-])", line):
        print(line)
PYTHON
install --requirement "$VENV/requirements.txt"
install dill
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# torchvision is imported and not used; this module of it looks for operators that are built for CUDA.
: > "$packages/torchvision/_meta_registrations.py"
# SGLang tells NIXL that every KV cache is a GPU's memory, which UCX refuses for a CPU's. With the other word pairs run on a CPU.
sed -i 's/"VRAM"/"DRAM"/g; s/for mem_kind in ("DRAM", "DRAM"):/for mem_kind in ("DRAM",):/' \
    "$packages/sglang/srt/disaggregation/nixl/conn.py" "$packages/sglang/srt/disaggregation/decode.py"
grep -q 'for mem_kind in ("DRAM",):' "$packages/sglang/srt/disaggregation/nixl/conn.py"
mkdir -p "$packages/sgl_kernel"
cat > "$packages/sgl_kernel/__init__.py" <<'PYTHON'
import torch

# Those that modules of models look up as they are imported, for Qwen3.5; Qwen-VL's processor imports them all.
LOOKED_UP = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)


def _missing(name):
    def missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} is not built for this machine")

    return missing


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


for looked_up in LOOKED_UP:
    setattr(torch.ops.sgl_kernel, looked_up, _missing(looked_up))
PYTHON
install blake3 huggingface-hub ml-dtypes msgspec numpy pydantic
install httpx hypothesis psutil pytest pytest-asyncio pytest-timeout
