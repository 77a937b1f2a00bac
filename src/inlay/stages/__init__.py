"""Pipelines of several models behind one request: the graph of stages.

Pure Python, without a model or a transport: an extension walks it.
"""
