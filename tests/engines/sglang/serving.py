"""Settings of a small SGLang on a CPU.

Its cache is bounded by tokens, as the share of memory counts what others take meanwhile.
"""

from typing import Any

FLAGS: dict[str, Any] = {
    "engine": "sglang",
    "device": "cpu",
    "num_threads": 1,
    "max_num_seqs": 16,
    "engine_arguments": ["--max-total-tokens", "8192", "--mem-fraction-static", "0.8"],
}

PATCH = 14
"""Side of a patch of models with images. SGLang takes others of Qwen2.5-VL for finished rows."""
