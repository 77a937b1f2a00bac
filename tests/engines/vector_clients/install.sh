#!/usr/bin/env bash
# inlay's client, and clients of other servers of vectors, whose versions of shared libraries are their own.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
"$UV" pip install --quiet --python "$VENV" --constraint "$here/constraints.txt" --editable . \
    cohere voyageai huggingface_hub langchain-cohere langchain-openai langchain-voyageai \
    llama-index-embeddings-text-embeddings-inference llama-index-postprocessor-tei-rerank \
    cohere-haystack huggingface-api-haystack \
    httpx hypothesis psutil pytest pytest-asyncio pytest-timeout pytest-xdist
