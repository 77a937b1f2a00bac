"""The built-in engine: transformers models over paged attention, with continuous batching.

Prompts may be tokens, embedding vectors, or both. One step goes through these types:

- `TorchEngine` (`engine.py`) implements the engine protocols on the event loop; a thread runs
  `Core` (`step.py`); `loading.py` builds it. A step has six stages, an object with one method each:
  `Scheduler.schedule`, `Runner.run`, `Lookahead.push` (which launched step is read now),
  `TokenSampler.sample` (a run of tokens for each chunk: without drafts, of one), `Committer.commit`
  and `Emitter.emit`.
- `Scheduler` (`scheduler.py`) is pure Python: it admits, schedules, commits, preempts and finishes
  `Sequence`s; `fairness.py` divides pages and places among clients; `AdapterTurns` chooses the LoRA
  adapters of a step; `PrefixLookup` finds cached pages.
- `cache/` holds `PrefixCache` and `PageTable`: which pages exist, who holds them, which digests
  name them. No tensors.
- `Batch` is a scheduled step as tensors. `CausalModel` (`model.py`) runs it; `attention/`,
  `weights/`, `native/` (C++ kernels for CPUs), `lora.py` and `decode_graphs.py` (CUDA graphs)
  belong to it.
- `sampling/` turns logits into token ids, `grammar/` computes masks of allowed tokens,
  `prompt_logprobs.py` scores prompts.
- `needs.py`: what a sequence waits for, `Need`s of four kinds. Those of a request (pages that
  others keep, its grammar's state) are known when it is admitted; others the scheduler finds when
  there is room (`start_needs.py`): rows of media that the prefix cache does not hold, pages it lost
  by preemption, a page that another sequence computes. A `Provider` on the event loop brings all
  but the last (`MediaProvider`, `PageExchange`, `GrammarProvider`); `Core.fulfil` is the way back.
- `media/` encodes the media of prompts, off the engine's thread; `prompt_media.py` keeps the rows
  of a sequence. In a batch, images are rows.
- `InFlightStep` is a step whose results are not read yet. `CacheEventQueue` reports changes of the
  prefix cache, `SleepState` keeps what a sleeping engine needs to wake.

Overlap (lag one). A step is launched (scheduled, packed, its forward pass enqueued), its next
tokens are sampled, and it is collected (read, checked, committed, emitted). With overlap, the
default on a GPU (`--async-scheduling`), the order is: launch step n + 1, collect step n, sample for
step n + 1. So the device computes the model of n + 1 while the host reads n. Only the forward pass
starts without the last token on the host: it stays on the device (`Sequence.has_pending_token`) and
n + 1 gathers it there. Sampling knows all earlier tokens, so penalties, bad words, grammars and
logprobs do not change. Overlap has not been measured on a GPU.

Invariants:

- A sequence that ends when n is read has one position too many in n + 1: it is dropped, and its
  page has no digest and is scrubbed. An end by `max_tokens` is known in advance.
- Results are committed only after they are read and found finite; only committed pages are shared.
- No sequence is preempted while one of its steps is unread: the scheduler reports that it is
  blocked, and the next step is collected first.
- Sampling waits for the device only for top_p or min_p without top_k, or with a top_k above 256:
  the number of candidates then depends on the data.
"""
