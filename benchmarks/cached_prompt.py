"""What a prompt of embeddings costs over the same prompt as token ids, when the engine has it all cached.

The prefix is fully cached, so the model computes one position and what is left is the way there: body, parser, checks, digests,
transport. Requests alternate (ids, embeddings, ids, ...) in one run against each server, and the ratio is of medians.

    python -m benchmarks.cached_prompt [--rounds N] [--only inlay]
"""

import argparse
import base64
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import _serving
from benchmarks._serving import Server

HIDDEN = 4096
SIZES = {"1 MB": 127, "10 MB": 1276, "64 MB": 8190}
LIMIT = 80 * 1024 * 1024


def bodies(table: torch.Tensor, num_tokens: int) -> dict[str, bytes]:
    """The same prompt as ids and as embeddings looked up from the model's own table."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(3, 500, (num_tokens,), generator=generator)
    file = io.BytesIO()
    torch.save(table[ids].clone(), file)
    base = {"model": "m", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return {
        "ids": json.dumps({**base, "prompt": ids.tolist()}).encode(),
        "embeds": json.dumps({**base, "prompt_embeds": base64.b64encode(file.getvalue()).decode()}).encode(),
    }


def seconds(server: Server, body: bytes) -> float:
    start = time.perf_counter()
    status, answer = server.post("/v1/completions", body)
    elapsed = time.perf_counter() - start
    if status != 200:
        raise RuntimeError(f"{server.name}: {status} {answer[:300]!r}")
    return elapsed


def measure(server: Server, table: torch.Tensor, sizes: dict[str, int], rounds: int) -> None:
    for label, num_tokens in sizes.items():
        forms = bodies(table, num_tokens)
        for body in forms.values():
            seconds(server, body)
            seconds(server, body)
        times: dict[str, list[float]] = {form: [] for form in forms}
        for _ in range(rounds):
            for form, body in forms.items():
                times[form].append(seconds(server, body))
        ids, embeds = (statistics.median(times[form]) for form in ("ids", "embeds"))
        print(
            f"{server.name:8} {label:>6} {num_tokens:5} rows   ids {1e3 * ids:7.1f} ms   embeds {1e3 * embeds:7.1f} ms   "
            f"{embeds / ids:5.2f}x   +{1e3 * (embeds - ids):.1f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["inlay", "vllm", "dynamo"], action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = _serving.wide_model(Path(directory) / "model", hidden=HIDDEN)
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        launchers = {
            "inlay": lambda: _serving.inlay(
                model,
                "--max-prompt-embeds-bytes",
                LIMIT,
                "--max-body-bytes",
                2 * LIMIT,
                "--max-num-batched-tokens",
                8192,
            ),
            "vllm": lambda: _serving.vllm(model, "--max-model-len", 10_000, "--block-size", 16),
            "dynamo": lambda: _serving.dynamo(model, "--max-model-len", 10_000, "--block-size", 16),
        }
        for name, launch in launchers.items():
            running = launch() if not options.only or name in options.only else None
            if running is None:
                continue
            with running as server:
                # Dynamo refuses what is over 10 MiB once decoded.
                sizes = {k: v for k, v in SIZES.items() if name != "dynamo" or v < 1280}
                measure(server, table, sizes, options.rounds)


if __name__ == "__main__":
    main()
