#!/usr/bin/env bash
# inlay's client, and clients of OpenAI's API, whose versions of shared libraries are their own; one is of Node.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
"$UV" pip install --quiet --python "$VENV" --constraint "$here/constraints.txt" --editable . \
    litellm langchain-openai openai-agents httpx hypothesis psutil \
    pytest pytest-asyncio pytest-timeout pytest-xdist
npm install --silent --prefix "$VENV/node" openai@7.59.0
