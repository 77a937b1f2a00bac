"""Prometheus metrics of a frontend, its store, router and cache, and of the workers.

`requests.Metrics` has the frontend's own counters; the other modules are collectors that read the
counters of their object at a scrape. Workers are asked for their engines' counters at each scrape
(`engine.EngineMetrics.refresh`), within half a second. Names are vLLM's where the meaning is the
same, else they begin with `inlay:`.
"""
