"""Pipelines of several models behind one request: the graph of stages, and plans through it.

Pure Python, without a model or a transport: `inlay.router.stages` walks a plan.
"""
