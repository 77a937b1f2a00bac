"""llama.cpp as a peer of `benchmarks/gguf.py`, in an environment of its own: `pip install
llama-cpp-python`, compiled for this CPU.

Answers lines of JSON on its standard output: see `Peer`.
"""

import json
import os
import sys
import time

import llama_cpp as llama
import numpy as np

_MAX_LEN, _MOST = 4096, 32
_PROMPT = 16


class Peer:
    """One model, without sampling: steps of decoding and prompts."""

    def __init__(self, path: str, threads: int) -> None:
        """Load the model at `path`."""
        llama.llama_backend_init()
        # ggml prints to the standard output of C.
        silent = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(silent, None)
        self._silent = silent
        self._model = llama.llama_model_load_from_file(
            path.encode(), llama.llama_model_default_params()
        )
        given = llama.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_ubatch = _MAX_LEN, 2048, 512
        given.n_seq_max, given.kv_unified = _MOST, True
        given.n_threads = given.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, given)
        self._batch = llama.llama_batch_init(2048, 0, 1)

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Compute (id, position, sequence, whether its logits are wanted)."""
        for n, (token, place, sequence, wanted) in enumerate(tokens):
            self._batch.token[n], self._batch.pos[n] = token, place
            self._batch.n_seq_id[n], self._batch.seq_id[n][0] = 1, sequence
            self._batch.logits[n] = wanted
        self._batch.n_tokens = len(tokens)
        if llama.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")

    def _clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def decode(self, batch: int, steps: int) -> dict[str, float]:
        """Seconds of a step with `batch` sequences."""
        self._clear()
        for sequence in range(batch):
            self._run(
                [(1000 + sequence + n, n, sequence, n == _PROMPT - 1) for n in range(_PROMPT)]
            )
        begun, cpu = time.perf_counter(), time.process_time()
        for step in range(steps):
            self._run([(2000 + s, _PROMPT + step, s, True) for s in range(batch)])
            llama.llama_synchronize(self._context)
        return {
            "wall": (time.perf_counter() - begun) / steps,
            "cpu": (time.process_time() - cpu) / steps,
        }

    def prompt(self, tokens: int) -> dict[str, float]:
        """Seconds of a prompt."""
        self._clear()
        begun, cpu = time.perf_counter(), time.process_time()
        for start in range(0, tokens, 512):
            self._run(
                [
                    (1000 + n * 7 % 5000, n, 0, n == tokens - 1)
                    for n in range(start, min(tokens, start + 512))
                ]
            )
        llama.llama_synchronize(self._context)
        return {"wall": time.perf_counter() - begun, "cpu": time.process_time() - cpu}

    def scores(self, ids: list[int]) -> dict[str, list[float]]:
        """Log-probabilities of the ids after the first."""
        self._clear()
        self._run([(token, n, 0, True) for n, token in enumerate(ids)])
        found = []
        size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        for n, token in enumerate(ids[1:]):
            pointer = llama.llama_get_logits_ith(self._context, n)
            row = np.ctypeslib.as_array(pointer, (size,)).astype(np.float64)
            top = row.max()
            found.append(float(row[token] - top - np.log(np.exp(row - top).sum())))
        return {"logprobs": found}


def main() -> None:
    """Serve one model."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # What it needs is imported.
    out.write("{}\n")
    sys.stdin.readline()
    begun, cpu = time.perf_counter(), time.process_time()
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    first = {"wall": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    out.write(json.dumps(first) + "\n")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        out.write(json.dumps(getattr(peer, name)(*arguments)) + "\n")


if __name__ == "__main__":
    main()
