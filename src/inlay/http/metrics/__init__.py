"""Prometheus metrics of a frontend, its store, router and cache, and of the workers.

`requests.Metrics` has the frontend's own counters; `collectors` reads those of other objects at a
scrape. Workers are asked for their engines' counters at each scrape
(`engine.EngineMetrics.refresh`), within half a second. Names are vLLM's where the meaning is the
same, else they begin with `inlay:`.
"""
