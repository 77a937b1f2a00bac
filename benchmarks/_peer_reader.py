"""vLLM's and Dynamo's own way from a body to a tensor.

Run with the python of either; answers each line `STAGE FILE` with the seconds it took.

reader    from the base64 alone: vLLM's `safe_load_prompt_embeds`; under Dynamo the function of its worker that calls its own vLLM's
body      the JSON, the request model, then the same. Dynamo does this in its frontend, a binary of which nothing can be called alone
digests   vLLM's own digests of the tensor, of each block of `BLOCK` positions
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.renderers.embed_utils import safe_load_prompt_embeds
from vllm.v1.core.kv_cache_utils import _gen_prompt_embeds_extra_hash_keys

BLOCK = 32


def reader_of(config: object) -> Callable[[str], torch.Tensor]:
    """From base64 to a tensor."""
    if find_spec("dynamo") is None:
        return lambda text: safe_load_prompt_embeds(config, text.encode())
    handlers = import_module("dynamo.vllm.handlers")
    handler = SimpleNamespace(model_config=config)
    return lambda text: handlers.BaseWorkerHandler._decode_prompt_embeds(handler, text)


def main() -> None:
    torch.set_num_threads(1)
    config = SimpleNamespace(
        enable_prompt_embeds=True, get_hidden_size=lambda: int(sys.argv[1]), dtype=torch.bfloat16
    )
    # Libraries write lines of their own: answers go where they do not.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    read = reader_of(config)
    bodies: dict[str, bytes] = {}
    for line in sys.stdin:
        stage, path = line.split()
        if path not in bodies:
            bodies = {path: Path(path).read_bytes()}
        body = bodies[path]
        text = json.loads(body)["prompt_embeds"]
        if stage == "digests":
            tensor = read(text)
        start = time.perf_counter()
        if stage == "body":
            safe_load_prompt_embeds(
                config, CompletionRequest.model_validate(json.loads(body)).prompt_embeds
            )
        elif stage == "reader":
            read(text)
        else:
            request = SimpleNamespace(prompt_embeds=tensor, _prompt_embeds_per_block_hashes={})
            for first in range(0, len(tensor), BLOCK):
                _gen_prompt_embeds_extra_hash_keys(request, first, first + BLOCK)
        print(time.perf_counter() - start, file=answers)


if __name__ == "__main__":
    main()
