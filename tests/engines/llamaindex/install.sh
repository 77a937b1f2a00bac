#!/usr/bin/env bash
# inlay's client, and LlamaIndex, whose versions of shared libraries are its own.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
"$UV" pip install --quiet --python "$VENV" --constraint "$here/constraints.txt" --editable . \
    llama-index-llms-openai-like httpx hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
