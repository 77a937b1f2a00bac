"""Reranks of stored documents, outputs of one pass, bytes of an answer, and states by reference.

Random models of MiniLM's size in float32; texts of about 60 positions; all over HTTP. In turns, the
best of `--rounds`:

- reranks by MaxSim: references; the same texts, computed each time; a cross-encoder of the same
  size over the same pairs
- BGE-M3's three outputs in one pass, and in one each; sentence-transformers in the Python that
  `BENCH_SENTENCE_TRANSFORMERS` names, in one pass without a server, the heads by hand
- the bytes of an answer by format
- last states of a prompt that become the prompt of the next request: as base64, as a reference

    python -m benchmarks.stored_documents [--documents 100 1000] [--rounds 3] [--parts outputs ...]
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpx
from tests import output_models
from tests.embedding_models import WORDS, sized_embedding, tiny_scoring
from tests.live import SECRET, fleet
from tests.models import make
from tests.scratch import scratch

from benchmarks._options import parser_of
from benchmarks.embeddings import Peer
from inlay.client import hidden_states
from inlay.store import StoreSettings

SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
MOST = 10_000
POSITIONS = 2_048
WIDTH = 128
LIMITS: dict[str, Any] = {
    "max_embedding_inputs": MOST,
    "max_inflight_bytes": 2**31,
    "max_client_bytes": 2**30,
}
THREADS = 2

Post: TypeAlias = Callable[..., httpx.Response]


def best(rounds: int, *asked: Callable[[], Any]) -> list[float]:
    """Return the least seconds of each of some requests, in turns."""
    found: list[list[float]] = [[] for _ in asked]
    for _ in range(rounds):
        for times, ask in zip(found, asked, strict=True):
            began = time.perf_counter()
            ask()
            times.append(time.perf_counter() - began)
    return [min(times) for times in found]


@contextmanager
def posting() -> Iterator[Post]:
    """Yield a function that posts a body and checks the answer."""
    with httpx.Client(timeout=600) as client:

        def post(url: str, **body: Any) -> httpx.Response:
            answer = client.post(url, json=body)
            if answer.is_error:
                raise SystemExit(f"{url}: {answer.text[:300]}")
            return answer

        yield post


def documents(post: Post, texts: Sequence[str], counts: Sequence[int], rounds: int) -> None:
    """Rank references, texts, and pairs of a cross-encoder."""
    with (
        fleet(sized_embedding("bert", **SIZES), task="embed", num_threads=THREADS) as embedder,
        fleet(tiny_scoring("bert", **SIZES), task="score", num_threads=THREADS) as scorer,
    ):
        url = embedder.serve(store=StoreSettings().open(SECRET), **LIMITS)
        pairs = scorer.serve(max_embedding_inputs=MOST)
        for count in counts:
            some = list(texts[:count])
            cut: dict[str, Any] = {"truncate_prompt_tokens": -1}
            kept = post(
                f"{url}/v1/embeddings", input=some, outputs=["tokens"], store=True, **cut
            ).json()
            refs = [{"ref": item["ref"]} for item in kept["data"]]

            def rank(at: str, given: Sequence[Any], **more: Any) -> httpx.Response:
                asked = {"query": texts[0], "documents": given, "return_documents": False}
                return post(f"{at}/v1/rerank", **asked, **cut, **more)  # noqa: B023

            stored, computed, crossed = best(
                rounds,
                lambda: rank(url, refs, output="tokens"),  # noqa: B023
                lambda: rank(url, some, output="tokens"),  # noqa: B023
                lambda: rank(pairs, some),  # noqa: B023
            )
            print(
                f"{count} documents: stored {1000 * stored:.0f} ms, computed {computed / stored:.1f}"
                f" times that, cross-encoder {crossed / stored:.1f} times that",
                flush=True,
            )


def outputs(post: Post, texts: Sequence[str], rounds: int) -> None:
    """Compute three outputs in one pass, in three, and by sentence-transformers; show the sizes."""
    path, some = output_models.bge_m3(WIDTH, **SIZES), list(texts[:100])
    python = os.environ.get("BENCH_SENTENCE_TRANSFORMERS")
    peers = [Peer("bge-m3", python, path, THREADS, "float32")] if python else []
    with fleet(path, task="embed", dtype="float32", num_threads=THREADS) as running:
        url = f"{running.serve(**LIMITS)}/v1/embeddings"
        names = ["dense", "sparse", "tokens"]
        for peer in peers:
            peer.wait_ready()
            peer.embed(some[:20])
        file = {"encoding_format": "safetensors", "truncate_prompt_tokens": -1}
        post(url, input=some, outputs=names, **file)
        times = best(
            rounds,
            lambda: post(url, input=some, outputs=names, **file),
            *[lambda name=name: post(url, input=some, outputs=[name], **file) for name in names],
            *[lambda peer=peer: peer.embed(some) for peer in peers],
        )
        both, each, theirs = times[0], sum(times[1:4]), times[4:]
        print(
            f"three outputs of {len(some)} texts: one pass {1000 * both:.0f} ms, three passes "
            f"{each / both:.2f} times that, sentence-transformers, one pass, heads by hand: "
            f"{', '.join(f'{one / both:.2f}' for one in theirs) or 'not asked'} times that",
            flush=True,
        )
        for form, dtype in (
            ("float", None),
            ("base64", None),
            ("base64", "float16"),
            ("safetensors", "float16"),
            ("safetensors", "int8"),
        ):
            body = {"input": some[:20], "outputs": ["tokens"], "encoding_format": form}
            size = len(post(url, **body, embed_dtype=dtype).content)
            shown = f"{form} {dtype or 'float32'}"
            print(f"tokens of 20 texts, {shown}: {size / 20:,.0f} bytes a text", flush=True)
        for peer in peers:
            peer.close()


def states(post: Post, rounds: int) -> None:
    """Have a prompt's last states, and send them as the next prompt."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
    }
    path = make("qwen2", scratch("states") / "qwen2", **sizes, num_hidden_layers=2,
                num_key_value_heads=4, max_position_embeddings=4096)  # fmt: skip
    with fleet(path, num_threads=THREADS) as running:
        url = running.serve(
            enable_prompt_embeds=True, enable_hidden_states=True,
            store=StoreSettings().open(SECRET), **LIMITS,
        ) + "/v1/completions"  # fmt: skip
        random_ids = random.Random(5)

        def sent(form: str) -> tuple[int, int]:
            ids = [random_ids.randrange(5, 300) for _ in range(POSITIONS)]
            asked = {"layers": [-1], "format": form}
            answer = post(url, prompt=ids, max_tokens=1, hidden_states=asked)
            (found,) = hidden_states(answer.json()["choices"][0])
            again = post(url, **found.completion_args()["extra_body"], max_tokens=1)
            return len(answer.content), len(again.request.content)

        def plain() -> None:
            for _ in range(2):
                ids = [random_ids.randrange(5, 300) for _ in range(POSITIONS)]
                post(url, prompt=ids, max_tokens=1)

        value, ref = sent("base64"), sent("ref")
        by_value, by_ref, without = best(rounds, lambda: sent("base64"), lambda: sent("ref"), plain)
        print(f"{POSITIONS} states of {sizes['hidden_size']}, out and in as the next prompt: by "
              f"reference {1000 * by_ref:.0f} ms ({ref[0] + ref[1]:,} bytes of bodies), by value "
              f"{1000 * by_value:.0f} ms ({value[0] + value[1]:,}); two prompts of ids "
              f"{1000 * without:.0f} ms", flush=True)  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    known = ("documents", "outputs", "states")
    parser.add_argument("--parts", choices=known, nargs="+", default=known)
    options = parser.parse_args()
    words = random.Random(1)
    texts = [" ".join(words.choices(WORDS, k=48)) for _ in range(max(100, *options.documents))]
    print(f"load {os.getloadavg()[0]:.1f}")
    with posting() as post:
        if "outputs" in options.parts:
            outputs(post, texts, options.rounds)
        if "states" in options.parts:
            states(post, options.rounds)
        if "documents" in options.parts:
            documents(post, texts, options.documents, options.rounds)


if __name__ == "__main__":
    main()
