"""Texts embedded a second, and one at a time, beside others.

And what part of a request passes without the model.

    BENCH_MODEL=all-MiniLM-L6-v2 python -m benchmarks.embeddings
    BENCH_SENTENCE_TRANSFORMERS=venv/bin/python BENCH_ONNX=venv/bin/python BENCH_VLLM=...
    BENCH_INFINITY=... ... python -m benchmarks.embeddings --threads 2 --rounds 5

`BENCH_MODEL` is a directory of a model of MiniLM's shape; without it a random one is made. Peers
run in the Python their variable names. All embed the same `--texts` texts of mixed length, drawn
log-normally, in turns for `--rounds` rounds, from text to vectors, in one process each without a
server; the table shows the best of each. With one thread, times are each process's own CPU seconds,
which a busy machine blurs little. The peak is that of one large product of the same dtype, measured
in the same run.

The second part asks a server over HTTP, and takes from each request's time that in which the model
had a batch, as the server's metrics say: what is left nothing hid. `--parts` chooses among speed,
outside and wide, which is the same with 100 texts and one layer of a large decoder.

Tried without gain (MiniLM's shape, AMX, one thread): int8 over tiles with a scale for each position
(56 ms against 47 in bfloat16, and a cosine of 0.991); chunks of 256 or 512 positions, which read
all weights again; the exact GELU (761 GFLOP/s against 1,167 with a polynomial of degree 8); one
call to oneDNN for each product; weights asked for ahead. A native call has four barriers a layer,
as a line that one core wrote reaches another in 12 ns.
"""

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from tests.live import fleet
from transformers import BertConfig, BertModel, BertTokenizerFast, Qwen3Config, Qwen3Model

from benchmarks._options import parser_of
from inlay import engine as engines
from inlay.api.generation.truncation import Truncation
from inlay.api.openai.embeddings.gathering import normalized
from inlay.api.openai.embeddings.inputs import TextInputs, chunks
from inlay.engine.embed.engine import EmbedEngine
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.threads import environment
from inlay.messages.digest import Secret
from inlay.messages.request import Output, Pooling, Request, Task
from inlay.render import Renderer

ONE = "what is the capital of the island on the hill and who rules it"
PEERS = {
    "sentence-transformers": "BENCH_SENTENCE_TRANSFORMERS",
    "onnx": "BENCH_ONNX",
    "vllm": "BENCH_VLLM",
    "infinity": "BENCH_INFINITY",
}
DTYPES = {
    "sentence-transformers": ("float32", "bfloat16"),
    "onnx": ("float32", "int8"),
    "vllm": ("float32", "bfloat16"),
    "infinity": ("float32",),
}
_WORDS = (
    "the of and to in is was for on that by this with from at as it an be are which have or has had were but not one "
    "harbour town lantern night number book island hill ship south north wind cold question answer document page river"
)
WORDS = _WORDS.split()


class Contender(Protocol):
    """Something that embeds."""

    name: str

    def embed(self, texts: list[str]) -> float:
        """The seconds it took."""
        ...


class Inlay:
    """The real engine and tokenizer, in this process."""

    def __init__(self, model: Path, threads: int, dtype: str, precision: str = "highest") -> None:
        self.name = f"inlay {dtype}" if precision == "highest" else f"inlay {precision} {dtype}"
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._loop = asyncio.new_event_loop()
        settings = EngineSettings.of(
            model=str(model),
            task="embed",
            dtype=dtype,
            num_threads=threads,
            float32_matmul_precision=precision,
        )
        engine = engines.create(settings, Secret.random())
        assert isinstance(engine, EmbedEngine)
        self._engine = engine
        self._loop.run_until_complete(self._engine.start())
        self._renderer = Renderer.load(self._engine.card.path)

    def embed(self, texts: list[str]) -> float:
        start = self._clock()
        self._loop.run_until_complete(self._embed(texts))
        return self._clock() - start

    async def _embed(self, texts: list[str]) -> None:
        limit = self._engine.card.limits.max_model_len
        inputs = TextInputs(texts, self._renderer, Truncation(limit, limit))
        answers: asyncio.Queue[Output] = asyncio.Queue()
        stretches = list(chunks(inputs))
        for start, stop in stretches:
            prompts = tuple(piece.prompt for piece in inputs.pieces(start, stop))
            request = Request(id=str(start), task=Task.EMBED, prompts=prompts, params=Pooling())
            self._engine.submit(request, answers.put_nowait)
            await asyncio.sleep(0)
        for _ in stretches:
            (payload,) = (await answers.get()).payloads
            normalized(
                torch.frombuffer(bytearray(payload.data.view), dtype=torch.float32)
                .view(payload.shape)
                .numpy()
            )


class Peer:
    """Somebody else, in a process of its own."""

    def __init__(self, kind: str, python: str, model: Path, threads: int, dtype: str) -> None:
        self.name = f"{kind} {dtype}"
        script = str(Path(__file__).with_name("_embedding_peers.py"))
        self._process = subprocess.Popen(
            [python, script, kind, str(model), str(threads), dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={
                **os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": "", "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
            },
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Return once it has loaded."""
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended")
        return line

    def embed(self, texts: list[str]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def corpus(count: int) -> list[str]:
    """Texts of log-normal length: in MiniLM's tokens a mean of about 70."""
    generator = random.Random(0)
    return [
        " ".join(
            generator.choices(WORDS, k=min(240, max(3, int(generator.lognormvariate(3.95, 0.8)))))
        )
        for _ in range(count)
    ]


@contextmanager
def model_directory() -> Iterator[Path]:
    """The model `BENCH_MODEL` names, or a random one of MiniLM's shape."""
    named = os.environ.get("BENCH_MODEL")
    if named is not None:
        yield Path(named).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        config = BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            vocab_size=30522,
        )
        BertModel(config).save_pretrained(folder)
        vocabulary = Path(folder) / "vocab.txt"
        vocabulary.write_text(
            "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8"
        )
        BertTokenizerFast(str(vocabulary), model_max_length=256).save_pretrained(folder)
        yield Path(folder)


def peak(dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of one large product."""
    torch.set_num_threads(threads)
    size = 2048
    one, other = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    clock = time.process_time if threads == 1 else time.perf_counter
    best = float("inf")
    for _ in range(8):
        start = clock()
        one @ other
        best = min(best, clock() - start)
    return float(2 * size**3 / best)


def useful_flops(model: Path, texts: list[str]) -> float:
    """Of the products and the attention of a BERT over `texts` without padding."""
    config: dict[str, int] = json.loads((model / "config.json").read_text())
    hidden, inner, layers = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    lengths = [len(ids[:256]) for ids in Renderer.load(model).encode_texts(texts)]
    return sum(
        layers * (2 * length * (4 * hidden * hidden + 2 * hidden * inner) + 4 * length**2 * hidden)
        for length in lengths
    )


def throughput(model: Path, threads: int, rounds: int, count: int) -> None:
    """Print texts/s and latencies of all."""
    texts = corpus(count)
    flops = useful_flops(model, texts)
    peers: list[Peer] = []
    for kind, variable in PEERS.items():
        python = os.environ.get(variable)
        if python is None:
            print(f"({variable} is not set: no {kind})")
            continue
        peers += [Peer(kind, python, model, threads, dtype) for dtype in DTYPES[kind]]
    contenders: list[Contender] = [
        Inlay(model, threads, dtype) for dtype in ("float32", "bfloat16")
    ]
    contenders.append(Inlay(model, threads, "float32", "high"))
    for peer in peers:
        peer.wait_ready()
    contenders += peers
    all_: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    single: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.embed(texts[:50])
    for _ in range(rounds):
        for contender in contenders:
            all_[contender.name].append(contender.embed(texts))
            single[contender.name].append(
                statistics.median(contender.embed([ONE]) for _ in range(21))
            )
            print(
                f"{contender.name}: {all_[contender.name][-1]:.2f} s", file=sys.stderr, flush=True
            )
    peaks = {"float32": peak(torch.float32, threads), "bfloat16": peak(torch.bfloat16, threads)}
    kind = "CPU seconds" if threads == 1 else "seconds"
    print(
        f"\n{count} texts, {threads} threads, {kind}; peaks: "
        + ", ".join(f"{name} {flop / 1e9:.0f} GFLOP/s" for name, flop in peaks.items())
    )
    print(f"{'':30} texts/s  one, ms  GFLOP/s  of peak")
    for contender in contenders:
        name = contender.name
        best = min(all_[name])
        share = flops / best / peaks.get(name.split()[-1], float("nan"))
        print(
            f"{name:30} {count / best:7.1f} {1e3 * min(single[name]):8.2f} {flops / best / 1e9:8.1f} {share:8.0%}"
        )
        if isinstance(contender, Peer):
            contender.close()


def post(client: httpx.Client, url: str, body: Mapping[str, object]) -> float:
    """The seconds an answer took."""
    start = time.perf_counter()
    client.post(url + "/v1/embeddings", json=body).raise_for_status()
    return time.perf_counter() - start


def busy(client: httpx.Client, url: str) -> float:
    """Seconds in which the server's model has had a batch so far."""
    text = client.get(url + "/metrics").raise_for_status().text
    (found,) = re.findall(r"^inlay:engine_busy_seconds_total{.*} (\S+)$", text, re.MULTILINE)
    return float(found)


def outside(model: Path, count: int, **settings: Any) -> None:
    """Print what part of a request no batch was at the model: the real server over HTTP."""
    with fleet(model, task="embed", **settings) as running, httpx.Client(timeout=300) as client:
        url = running.serve()
        body: dict[str, object] = {"input": corpus(count), "truncate_prompt_tokens": -1}
        post(client, url, body)
        for encoding in ("float", "base64"):
            seconds, idle = [], []
            for _ in range(5):
                before = busy(client, url)
                seconds.append(post(client, url, {**body, "encoding_format": encoding}))
                idle.append(seconds[-1] - (busy(client, url) - before))
            best = min(range(5), key=seconds.__getitem__)
            print(
                f"{model.name} {settings['dtype']}, {count} texts as {encoding}: {seconds[best]:.3f} s, of which no batch was at the "
                f"model {1e3 * idle[best]:.0f} ms, {idle[best] / seconds[best]:.1%}",
                flush=True,
            )


@contextmanager
def wide(model: Path) -> Iterator[Path]:
    """One layer of an 8-billion decoder's shape with random weights, of whose 36 the real one has its time a text."""
    with tempfile.TemporaryDirectory(prefix="wide-") as folder:
        config = Qwen3Config(
            hidden_size=4096, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            intermediate_size=12288, vocab_size=30522, max_position_embeddings=512,
        )  # fmt: skip
        Qwen3Model(config).to(torch.bfloat16).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / file).write_bytes((model / file).read_bytes())
        yield Path(folder)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=1000)
    parts = ("speed", "outside", "wide")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    arguments = parser.parse_args()
    wanted = {**environment(os.environ), "OMP_NUM_THREADS": str(arguments.threads)}
    missing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    if missing:
        # libgomp reads its environment when it is loaded, which has happened.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.embeddings", *sys.argv[1:]],
            {**os.environ, **missing},
        )
    with model_directory() as model:
        if "speed" in arguments.parts:
            throughput(model, arguments.threads, arguments.rounds, arguments.texts)
        if "outside" in arguments.parts:
            for dtype in ("float32", "bfloat16"):
                outside(model, 1000, dtype=dtype, num_threads=arguments.threads)
        if "wide" in arguments.parts:
            with wide(model) as large:
                outside(large, 100, dtype="bfloat16", num_threads=arguments.threads)


if __name__ == "__main__":
    main()
