"""What a prompt of embeddings costs over the same prompt as token ids, when the engine has it all cached.

The prefix is fully cached, so the model computes one position and what is left is the way there:
body, parser, checks, digests, transport. The embeddings are sent as base64 in JSON and, to inlay,
also as a file of a multipart body and by reference to an upload. All servers run at once and take
turns, and so do the forms (ids, one form, ids, the next, ...); each ratio is the median over the
rounds of a form's time over that of the ids right before it. CPU is that of all processes of the
server, for one request of ids and one of the form.

    python -m benchmarks.cached_prompt [--rounds N] [--only inlay]

Where 10 MB by value go (ms more than ids): reading and decoding the body 7.3, checking each element
1.6, hashing each row 4.6, all else 0.7. Tried without gain: rows checked and hashed while the body
arrives (11.7 ms against 10.6; sender and server keep both cores busy already); digests by two
threads (6.4 ms against 4.5).
"""

import base64
import io
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import _serving
from benchmarks._options import parser_of
from benchmarks._serving import Server

SIZES = {"1 MB": 127, "4 MB": 511, "10 MB": 1276, "64 MB": 8190}


@dataclass(frozen=True)
class Form:
    """One way to say a prompt."""

    body: bytes
    content_type: str = "application/json"


def forms_of(
    server: Server, table: torch.Tensor, num_tokens: int, *, stored: bool = True
) -> dict[str, Form]:
    """The same prompt as ids, and in each form of embeddings looked up from the model's own table that the server takes.

    Args:
        server: asked, where it stores prompts, to store this one.
        table: (vocabulary, hidden).
        num_tokens: of the prompt.
        stored: whether to store it.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(3, 500, (num_tokens,), generator=generator)
    buffer = io.BytesIO()
    torch.save(table[ids].clone(), buffer)
    file = buffer.getvalue()

    def request(**fields: object) -> bytes:
        base = {"model": "m", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        return json.dumps({**base, **fields}).encode()

    # Dynamo wants a prompt beside embeddings, vLLM none.
    beside = {"prompt": ""} if server.name.startswith("dynamo") else {}
    forms = {
        "ids": Form(request(prompt=ids.tolist())),
        "value": Form(request(prompt_embeds=base64.b64encode(file).decode(), **beside)),
    }
    if server.name.startswith("inlay"):
        boundary = b"5c7a2e0f9d1b4c86b3f0a7e4d2918c6f"
        head = b"--" + boundary + b"\r\ncontent-disposition: form-data; name="
        parts = [(b"request", request(prompt_embeds={"part": "a"})), (b"a", file)]
        body = (
            b"".join(head + name + b"\r\n\r\n" + data + b"\r\n" for name, data in parts)
            + b"--"
            + boundary
            + b"--\r\n"
        )
        forms["multipart"] = Form(body, f"multipart/form-data; boundary={boundary.decode()}")
    if server.name.startswith("inlay") and stored:
        status, answer = server.post("/v1/prompt_embeds", file, "application/octet-stream")
        if status != 200:
            raise RuntimeError(f"{server.name}: {status} {answer[:300]!r}")
        forms["reference"] = Form(request(prompt_embeds={"ref": json.loads(answer)["id"]}))
    return forms


@dataclass(frozen=True)
class Cost:
    """Of one request: seconds that the client waits, and CPU seconds of the server's processes."""

    wall: float
    cpu: float


def cost(server: Server, form: Form) -> Cost:
    """Of sending a form and reading the answer."""
    cpu = server.cpu_seconds()
    start = time.perf_counter()
    status, answer = server.post("/v1/completions", form.body, form.content_type)
    elapsed = time.perf_counter() - start
    if status != 200:
        raise RuntimeError(f"{server.name}: {status} {answer[:300]!r}")
    return Cost(elapsed, server.cpu_seconds() - cpu)


def measure(
    servers: list[Server], table: torch.Tensor, label: str, num_tokens: int, rounds: int
) -> dict[tuple[str, str], float]:
    """Print what every server's forms of one prompt cost, all taking turns.

    By server and form, the ratio of its time to that of ids.
    """
    forms = {server.name: forms_of(server, table, num_tokens) for server in servers}
    costs: dict[tuple[str, str], list[tuple[Cost, Cost]]] = {}
    for turn in range(rounds + 2):
        for server in servers:
            for name, form in forms[server.name].items():
                if name == "ids":
                    continue
                pair = (cost(server, forms[server.name]["ids"]), cost(server, form))
                # The first turns fill the caches.
                if turn >= 2:
                    costs.setdefault((server.name, name), []).append(pair)
    ratios = {}
    for (server_name, name), pairs in costs.items():
        ratio = ratios[server_name, name] = statistics.median(
            form.wall / ids.wall for ids, form in pairs
        )
        more = 1e3 * statistics.median(form.wall - ids.wall for ids, form in pairs)
        plain, own = (
            1e3 * statistics.median(each.wall for each in column)
            for column in zip(*pairs, strict=True)
        )
        # The system counts CPU time in hundredths of a second: only means say anything.
        cpu, own_cpu = (
            1e3 * statistics.fmean(each.cpu for each in column)
            for column in zip(*pairs, strict=True)
        )
        print(
            f"{server_name:8} {label:>6} {num_tokens:5} rows   ids {plain:7.1f} ms   {name:9} {own:7.1f} ms   "
            f"{more:+7.1f} ms   {ratio:5.2f}x   CPU {cpu:6.1f} and {own_cpu:6.1f} ms",
            flush=True,
        )
    return ratios


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["inlay", "vllm", "dynamo"], action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = _serving.wide_model(Path(directory) / "model")
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        servers = _serving.side_by_side(stack, model, options.only or ())
        for label, num_tokens in SIZES.items():
            able = [server for server in servers if _serving.takes(server.name, num_tokens)]
            measure(able, table, label, num_tokens, options.rounds)


if __name__ == "__main__":
    main()
