"""Peers that embed, each in its own Python, driven over standard input by `benchmarks/embeddings.py`: texts a line, seconds back.

Runs where inlay is not installed: `PYTHON _embedding_peers.py KIND MODEL THREADS DTYPE`.
"""

import json
import os
import sys
import tempfile
import time
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

ORT_BUDGET = 512
"""Padded positions of a batch at which ONNX Runtime was fastest."""


def sentence_transformers(model: str, threads: int, dtype: str) -> Any:
    import torch

    # Not installed where types are checked.
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: loaded.encode(texts, show_progress_bar=False)


def bge_m3(model: str, threads: int, dtype: str) -> Any:
    """Three outputs of one pass: random heads of BGE-M3's form, over the states of all positions."""
    import torch
    from sentence_transformers import SentenceTransformer
    from torch.nn import functional

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    hidden = loaded.get_embedding_dimension()
    sparse, colbert = ((torch.randn(size, hidden), torch.randn(size)) for size in (1, 128))

    def embed(texts: list[str]) -> Any:
        made = []
        for each in loaded.encode(texts, output_value=None, show_progress_bar=False):
            states = each["token_embeddings"]
            weights = functional.linear(states, *sparse).relu()
            tokens = functional.normalize(functional.linear(states, *colbert)[1:])
            made.append((each["sentence_embedding"].numpy(), weights.numpy(), tokens.numpy()))
        return made

    return embed


def vllm(model: str, threads: int, dtype: str) -> Any:
    from vllm import LLM

    engine = LLM(
        model,
        runner="pooling",
        dtype=dtype,
        max_model_len=256,
        enforce_eager=True,
        disable_log_stats=True,
    )
    return lambda texts: engine.embed(texts, use_tqdm=False)


def onnx(model: str, threads: int, dtype: str) -> Any:
    """Exported, sorted by length, mean pooled: what ONNX Runtime can do at best.

    `dtype` is float32 or int8.
    """
    import numpy as np
    import onnxruntime
    import torch
    from onnxruntime.quantization import quantize_dynamic
    from tokenizers import Tokenizer
    from transformers import AutoModel

    folder = tempfile.mkdtemp()
    path = f"{folder}/model.onnx"
    loaded = AutoModel.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    names = ["input_ids", "attention_mask"]
    # MPNet has no types.
    names += ["token_type_ids"] * hasattr(loaded.config, "type_vocab_size")
    given = tuple(torch.ones(2, 5, dtype=torch.int64) for _ in names)

    class States(torch.nn.Module):
        """The hidden states alone, by the names of their inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.model = loaded

        def forward(self, *inputs: torch.Tensor) -> Any:
            return self.model(**dict(zip(names, inputs, strict=True))).last_hidden_state

    torch.onnx.export(
        States(), given, path, input_names=names, output_names=["states"], opset_version=17, dynamo=False,
        dynamic_axes={name: {0: "batch", 1: "length"} for name in [*names, "states"]},
    )  # fmt: skip
    if dtype == "int8":
        quantize_dynamic(
            path, f"{folder}/int8.onnx", per_channel=True, extra_options={"DefaultTensorType": 1}
        )
        path = f"{folder}/int8.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)

    def embed(texts: list[str]) -> Any:
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        out = np.empty((len(ids), loaded.config.hidden_size), np.float32)
        start = 0
        while start < len(order):
            longest = len(ids[order[start]])
            chosen = order[start : start + max(1, ORT_BUDGET // longest)]
            batch = np.zeros((len(chosen), longest), np.int64)
            mask = np.zeros_like(batch)
            for row, index in enumerate(chosen):
                batch[row, : len(ids[index])] = ids[index]
                mask[row, : len(ids[index])] = 1
            inputs = (batch, mask, np.zeros_like(batch))
            (states,) = session.run(None, dict(zip(names, inputs, strict=False)))
            pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            out[chosen] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
            start += len(chosen)
        return out

    return embed


def infinity(model: str, threads: int, dtype: str) -> Any:
    """Its engine without its server; texts go in at once, as its route has them."""
    import asyncio

    import torch
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    torch.set_num_threads(threads)
    loop = asyncio.new_event_loop()
    engine = AsyncEmbeddingEngine.from_args(
        EngineArgs(model_name_or_path=model, engine="torch", device="cpu", dtype=dtype, bettertransformer=False, model_warmup=False)
    )  # fmt: skip
    loop.run_until_complete(engine.astart())
    return lambda texts: loop.run_until_complete(engine.embed(sentences=texts))


PEERS = {
    "bge-m3": bge_m3,
    "infinity": infinity,
    "sentence-transformers": sentence_transformers,
    "vllm": vllm,
    "onnx": onnx,
}


def main() -> None:
    kind, model, threads, dtype = sys.argv[1:5]
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock = time.process_time if threads == "1" else time.perf_counter
    embed = PEERS[kind](model, int(threads), dtype)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        start = clock()
        embed(texts)
        print(json.dumps(clock() - start), file=answers, flush=True)


if __name__ == "__main__":
    main()
