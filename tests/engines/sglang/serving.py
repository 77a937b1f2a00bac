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
