"""Images from files to a tower's inputs, a cached image's first token, and what a bomb costs.

    python -m benchmarks.images
    BENCH_VLLM=venv/bin/python python -m benchmarks.images --rounds 5

Inputs are those of Qwen2.5-VL's processor for JPEG files of 1024 x 1024 pixels: 23 MB of patches
each. inlay reads the header, decodes and preprocesses as its workers do; transformers is Pillow and
its processor with Pillow's backend; vLLM, in the Python that `BENCH_VLLM` names, is its image
reader and its multimodal processor without the cache. They take turns in one run, each in its own
process; times are a process's own CPU time for one image, one thread, and the table has the best
round of each.

First tokens are those of a server with a small LLaVA: 576 rows of an image between 40 and 8 tokens,
sent as a file, by reference, and as as many token ids, all of them cached. Requests of one token
take turns, 40 of a form; the table has the CPU time of the frontend's process and of the engine's
for one request, and the median of its whole time, which a busy machine decides.

Bombs are refused from their headers: by `image_item` alone, and by the server, beside a request
that is refused for its JSON.
"""

import base64
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers as hf
from PIL import Image
from psutil import Process
from tests.serving import serving
from tests.vision_models import vision

from benchmarks import _images
from benchmarks._options import parser_of
from inlay.base.errors import InvalidRequestError
from inlay.engine.pictures import decode
from inlay.engine.torch.media.readers import processor_of
from inlay.media.families import spec_of
from inlay.media.image import read_image_header
from inlay.media.items import image_item
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer

SIDE, FILES = 1024, 3
BEFORE, ROWS, AFTER = 40, 576, 8
REQUESTS = 40


def pictures(folder: Path) -> list[Path]:
    """JPEG files with as much detail as photographs have, by their sizes."""
    random = np.random.default_rng(0)
    found = []
    for index in range(FILES):
        small = Image.fromarray(random.integers(0, 256, (64, 64, 3)).astype(np.uint8))
        path = folder / f"{index}.jpg"
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=90)
        found.append(path)
    return found


def qwen(folder: Path) -> Path:
    """A tiny Qwen2.5-VL with the image processor of the released ones."""
    there = folder / "qwen"
    shutil.copytree(vision("qwen2_5_vl"), there)
    for name, values in (
        ("preprocessor_config.json",
         {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}),
        ("config.json", {}),
    ):  # fmt: skip
        path = there / name
        held = json.loads(path.read_text()) | values
        if name == "config.json":
            held["vision_config"]["patch_size"] = 14
            held["text_config"]["max_position_embeddings"] = 8192
        path.write_text(json.dumps(held))
    return there


def inlay(directory: Path) -> Callable[[bytes], object]:
    """Header, decoding and preprocessing of a worker."""
    spec = spec_of(directory)
    assert spec is not None
    settings = spec.processor_settings(None)
    process = processor_of(directory, hf.AutoConfig.from_pretrained(directory), spec)

    def run(data: bytes) -> object:
        return process(decode(memoryview(data), read_image_header(data)), settings)

    return run


class PeerEndedError(Exception):
    """A peer that does not run in its environment."""


class Peer:
    """A contender in another Python."""

    def __init__(self, python: str, name: str, directory: Path, files: Path) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(_images.__file__)), name, str(directory), str(files), "1000000"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            | {"OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu"},
        )  # fmt: skip
        self._first = True
        self.name = name

    def round(self) -> float:
        """CPU milliseconds of an image in one round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._first:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self._first = False
        for line in self._process.stdout:
            try:
                return float(json.loads(line))
            except ValueError:
                continue  # a library's own words
        raise PeerEndedError(f"{self.name} does not run there; benchmarks/_images.py says why")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def preprocessing(folder: Path, rounds: int) -> None:
    """Print the cost of an image at each contender."""
    files = folder / "files"
    files.mkdir()
    read = [path.read_bytes() for path in pictures(files)]
    directory = qwen(folder)
    ours = inlay(directory)
    ours(read[0])
    peers = [("transformers", sys.executable, "transformers")]
    if vllm := os.environ.get("BENCH_VLLM"):
        peers += [("transformers there", vllm, "transformers"), ("vllm", vllm, "vllm")]
    with ExitStack() as undo:
        contenders: dict[str, Callable[[], float]] = {
            "inlay": lambda: _images.milliseconds(ours, read)
        }
        for shown, python, name in peers:
            peer = Peer(python, name, directory, files)
            undo.callback(peer.close)
            try:
                peer.round()
            except PeerEndedError as error:
                print(f"\n{error}")
                continue
            contenders[shown] = peer.round
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, contender in contenders.items():
                taken[name].append(contender())
    print(f"\n{len(read)} JPEG files of {SIDE} x {SIDE}")
    best = min(taken["inlay"])
    print(f"{'':20}{'CPU ms':>10}{'images/s':>10}{'over inlay':>12}")
    for name, values in taken.items():
        least = min(values)
        print(f"{name:20}{least:>10.1f}{1000 / least:>10.1f}{least / best:>11.2f}x")


def llava(folder: Path) -> Path:
    """A small LLaVA with the tower's sizes of 1.5: 576 rows."""
    there = folder / "llava"
    shutil.copytree(vision("llava"), there)
    held = json.loads((there / "config.json").read_text())
    text = {
        **held["text_config"], "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 2048,
    }  # fmt: skip
    tower = {**held["vision_config"], "image_size": 336, "patch_size": 14}
    config = hf.LlavaConfig(**{**held, "text_config": text, "vision_config": tower})
    torch.manual_seed(0)
    hf.LlavaForConditionalGeneration(config).save_pretrained(there)
    size = {"height": 336, "width": 336}
    hf.CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=size).save_pretrained(there)
    return there


def bomb(side: int = 9000) -> bytes:
    """A PNG of one bit a pixel in 10 KB."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    data = zlib.compress(bytes(1 + (side + 7) // 8) * side, 9)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def serving_parts(folder: Path, rounds: int) -> None:
    """Print the first token of a cached image, and the cost of bombs."""
    directory = llava(folder)
    data = (folder / "files" / "0.jpg").read_bytes()
    with (
        serving(
            directory, "--served-model-name", "m", "--max-model-len", 2048, "--no-log-requests"
        ) as served,
        httpx.Client(base_url=served.url, timeout=600, trust_env=False) as client,
    ):
        cpu = _cpu_of(served.process.pid)

        def ask(prompt: list[object]) -> dict[str, Any]:
            body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        uploaded = client.post(
            "/v1/prompt_embeds", content=data, headers={"content-type": "image/jpeg"}
        ).json()["id"]
        url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
        before = {"type": "token_ids", "token_ids": list(range(5, 5 + BEFORE))}
        after = {"type": "token_ids", "token_ids": list(range(60, 60 + AFTER))}
        ids = list(range(5, 5 + BEFORE)) + [7 + i % 300 for i in range(ROWS)]
        prompts: dict[str, list[object]] = {
            "token ids": [{"type": "token_ids", "token_ids": ids}, after],
            "an image by reference": [before, {"type": "image_url", "ref": uploaded}, after],
            "an image as a file": [before, {"type": "image_url", "image_url": url}, after],
        }
        for prompt in prompts.values():
            ask(prompt)
            usage = ask(prompt)["usage"]
            assert usage["prompt_tokens"] == BEFORE + ROWS + AFTER, usage
            assert usage["prompt_tokens_details"]["cached_tokens"] >= BEFORE + ROWS - 16, usage
        engine = sum_of([_cpu_of(each.pid) for each in Process(served.process.pid).children(True)])
        bodies = {
            name: json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
            for name, prompt in prompts.items()
        }
        headers = {"content-type": "application/json"}
        taken: dict[str, list[float]] = {name: [] for name in prompts}
        frontends, engines = dict.fromkeys(prompts, 0.0), dict.fromkeys(prompts, 0.0)
        # Clocks of processes tick in 10 ms: many requests of one form, form by form.
        for _ in range(rounds):
            for name, body in bodies.items():
                began = cpu(), engine()
                for _ in range(REQUESTS):
                    start = time.perf_counter()
                    assert client.post("/v1/completions", content=body, headers=headers).is_success
                    taken[name].append((time.perf_counter() - start) * 1000)
                frontends[name] += (cpu() - began[0]) / REQUESTS / rounds
                engines[name] += (engine() - began[1]) / REQUESTS / rounds
        plain = statistics.median(taken["token ids"])
        least = frontends["token ids"] + engines["token ids"]
        print(f"\nfirst token of {BEFORE + ROWS + AFTER} cached positions; file: {len(data)} bytes")
        print(
            f"{'':24}{'CPU ms: frontend':>18}{'engine':>8}{'over ids':>10}{'wall':>8}{'over ids':>10}"
        )
        for name, values in taken.items():
            total, median = frontends[name] + engines[name], statistics.median(values)
            print(
                f"{name:24}{frontends[name]:>18.2f}{engines[name]:>8.2f}{total / least:>9.2f}x"
                f"{median:>8.1f}{median / plain:>9.2f}x"
            )
        bombs(directory, client, cpu, 50 * rounds)


def _cpu_of(pid: int) -> Callable[[], float]:
    process = Process(pid)
    return lambda: sum(process.cpu_times()[:2]) * 1000


def sum_of(clocks: list[Callable[[], float]]) -> Callable[[], float]:
    """Return a clock that counts what all of them do."""
    return lambda: sum(clock() for clock in clocks)


def bombs(directory: Path, client: httpx.Client, cpu: Callable[[], float], count: int) -> None:
    """Print what a bomb costs, alone and over HTTP."""
    data = bomb()
    spec = spec_of(directory)
    assert spec is not None
    secret, held = Secret(bytes(32)), Buffer(data)

    def refused() -> None:
        try:
            image_item(spec, held, secret)
        except InvalidRequestError:
            return
        raise SystemExit("the bomb was taken")

    refused()
    began = time.process_time()
    for _ in range(count):
        refused()
    alone = (time.process_time() - began) * 1000 / count
    image = {
        "type": "image_url",
        "image_url": "data:image/png;base64," + base64.b64encode(data).decode(),
    }
    costs = {}
    for name, prompt in (("a bomb", [image]), ("bad JSON of that size", {"x": image["image_url"]})):
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
        headers = {"content-type": "application/json"}
        began = cpu()
        for _ in range(count):
            assert client.post("/v1/completions", content=body, headers=headers).status_code == 400
        costs[name] = (cpu() - began) / count
    print(f"\na bomb of {len(data)} bytes, 9000 x 9000 pixels: {alone:.3f} ms of CPU to refuse")
    for name, cost in costs.items():
        print(f"over HTTP, {name}: {cost:.2f} ms of the frontend's CPU")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=["files", "server"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "files" in chosen.parts:
            preprocessing(folder, chosen.rounds)
        else:
            (folder / "files").mkdir()
            pictures(folder / "files")
        if "server" in chosen.parts:
            serving_parts(folder, chosen.rounds)


if __name__ == "__main__":
    main()
