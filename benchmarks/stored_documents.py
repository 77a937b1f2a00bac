"""Reranks of stored documents against the same texts, and outputs of one pass against one each.

A random model of MiniLM's size in float32; documents of about 60 positions; vectors of tokens are
compared (MaxSim). In turns, the best of `--rounds`: references; the same texts, computed each time;
a cross-encoder of the same size over the same pairs. Then the bytes of an answer by format.

    python -m benchmarks.stored_documents [--documents 100 1000] [--rounds 3]
"""

import argparse
import os
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
from tests.embedding_models import WORDS, sized_embedding, tiny_scoring
from tests.live import SECRET, fleet

from inlay.store import StoreSettings

SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
MOST = 10_000


def best(rounds: int, ask: Callable[[], httpx.Response]) -> float:
    """Return the least seconds of some requests."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        ask().raise_for_status()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    words = random.Random(1)
    texts = [" ".join(words.choices(WORDS, k=48)) for _ in range(max(options.documents))]
    with (
        fleet(sized_embedding("bert", **SIZES), task="embed") as embedder,
        fleet(tiny_scoring("bert", **SIZES), task="score") as scorer,
        httpx.Client(timeout=600) as client,
    ):
        url = embedder.serve(
            store=StoreSettings().open(SECRET),
            max_embedding_inputs=MOST,
            max_inflight_bytes=2**31,
            max_client_bytes=2**30,
        )
        pairs = scorer.serve(max_embedding_inputs=MOST)

        def post(path: str, at: str = url, **body: Any) -> httpx.Response:
            cut = {"truncate_prompt_tokens": -1}
            return client.post(at + path, json=body | cut)

        print(f"load {os.getloadavg()[0]:.1f}")
        for count in options.documents:
            some = texts[:count]
            asked: dict[str, Any] = {"query": texts[0], "return_documents": False}
            kept = post("/v1/embeddings", input=some, outputs=["tokens"], store=True).json()
            if "data" not in kept:
                raise SystemExit(str(kept))
            refs = [{"ref": item["ref"]} for item in kept["data"]]
            stored = best(
                options.rounds,
                lambda: post("/v1/rerank", **asked, documents=refs, output="tokens"),  # noqa: B023
            )
            computed = best(
                options.rounds,
                lambda: post("/v1/rerank", **asked, documents=some, output="tokens"),  # noqa: B023
            )
            crossed = best(
                options.rounds,
                lambda: post("/v1/rerank", pairs, **asked, documents=some),  # noqa: B023
            )
            print(
                f"{count} documents: stored {1000 * stored:.0f} ms, computed {computed / stored:.1f}"
                f" times that, cross-encoder {crossed / stored:.1f} times that"
            )
        some = texts[:100]
        both = best(
            options.rounds, lambda: post("/v1/embeddings", input=some, outputs=["dense", "tokens"],
                                         encoding_format="safetensors")
        )  # fmt: skip
        each = sum(
            best(
                options.rounds,
                lambda: post(
                    "/v1/embeddings",
                    input=some,
                    outputs=[name],  # noqa: B023
                    encoding_format="safetensors",
                ),
            )
            for name in ("dense", "tokens")
        )
        print(f"dense and tokens of 100 texts: two passes {each / both:.2f} times one")
        for form, dtype in (
            ("float", None),
            ("base64", None),
            ("base64", "float16"),
            ("safetensors", "float16"),
            ("safetensors", "int8"),
        ):
            body: dict[str, Any] = {
                "input": some[:20],
                "outputs": ["tokens"],
                "encoding_format": form,
            }
            size = len(post("/v1/embeddings", **body, embed_dtype=dtype).content)
            print(f"tokens of 20 texts, {form} {dtype or 'float32'}: {size / 20:,.0f} bytes a text")


if __name__ == "__main__":
    main()
