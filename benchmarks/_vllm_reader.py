"""vLLM's own way from a body to a tensor. Run with vLLM's python; answers each line `STAGE FILE` with the seconds it took.

reader    its `safe_load_prompt_embeds`, of the base64 alone
body      the JSON, the request model, then the same
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.renderers.embed_utils import safe_load_prompt_embeds


def main() -> None:
    torch.set_num_threads(1)
    config = SimpleNamespace(
        enable_prompt_embeds=True, get_hidden_size=lambda: int(sys.argv[1]), dtype=torch.bfloat16
    )
    bodies: dict[str, bytes] = {}
    for line in sys.stdin:
        stage, path = line.split()
        if path not in bodies:
            bodies = {path: Path(path).read_bytes()}
        body = bodies[path]
        if stage == "reader":
            encoded = json.loads(body)["prompt_embeds"].encode()
        start = time.perf_counter()
        if stage == "body":
            encoded = CompletionRequest.model_validate(json.loads(body)).prompt_embeds
        safe_load_prompt_embeds(config, encoded)
        print(f"SECONDS {time.perf_counter() - start}", flush=True)


if __name__ == "__main__":
    main()
