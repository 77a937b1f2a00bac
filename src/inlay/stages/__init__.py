"""The graph of stages of a pipeline, as cards and requests have it; checked when it is loaded.

Nothing runs here: an extension (`inlay_stages`) walks the graph.
"""
