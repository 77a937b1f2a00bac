#!/usr/bin/env bash
# Fill the environment $VENV with vLLM-Omni over vLLM for CPU, what a worker needs of inlay, and the tests' libraries. Run from the repository
# root.
#
# The constraints name all that is installed, without looking at requirements: of vLLM-Omni's 30 those are left out that only other devices
# and models of sound and video take, of vLLM's torchcodec.
set -euo pipefail

suite=$(dirname "${BASH_SOURCE[0]}")
python="$VENV/bin/python"
install() { "$UV" pip install --quiet --python "$python" --constraint "$suite/constraints.txt" "$@"; }

install torch
install --no-deps --requirement "$suite/constraints.txt"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# These look for what is built for CUDA; nothing here uses it.
: > "$packages/torchvision/_meta_registrations.py"
rm "$packages"/torchaudio/lib/_torchaudio*.so
# The platform for CPUs is a plug-in of this suite, and is found below the repository's root.
plugin="$packages/inlay_cpu_platform-1.dist-info"
mkdir "$plugin"
printf 'Metadata-Version: 2.1\nName: inlay-cpu-platform\nVersion: 1\n' > "$plugin/METADATA"
printf '[vllm_omni.platform_plugins]\ncpu = tests.engines.vllm_omni.cpu_plugin:platform\n' > "$plugin/entry_points.txt"
