"""Structured output: compiled grammars, the state of an output in one, and the masks of a step.

Costs and trials come before it, in `inlay.engine.grammar`.
"""
