"""Grammars before they are compiled: their cost, and their trial in a process that can be killed.

- `cost`, `regex`, `lark`, `schemas`: count what a grammar would cost, on its parsed form.
- `source`: a grammar in llguidance's form, if its count is within the limits.
- `cheap`: grammars that need no trial.
- `trial`, `trial_process`: one fork for each trial, within limits of time and memory.
- `fair_executor`: threads on which clients take turns.

The torch engine compiles with llguidance (`inlay.engine.torch.grammar`); vLLM compiles by itself,
after a count.
"""
