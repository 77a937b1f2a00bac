"""Embedding support outside the engines: a model's outputs, and a result cache.

`EmbeddingConfig` (`config.py`) reads the files of a model, in each of `layouts.py`, to a plan of
named outputs (`plan.py`), prompts and roles; anything else is refused. `bundles.py` has their
arrays on the wire. `ResultCache` (`cache.py`) keeps results by digest within a memory limit and
never computes the same result twice at a time. The frontend owns the cache: a hit costs no message
and no worker, and any worker's result serves all requests. No torch.
"""
