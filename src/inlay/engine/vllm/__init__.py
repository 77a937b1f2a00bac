"""vLLM behind inlay's engine protocols.

`engine.VllmEngine` runs vLLM's asynchronous engine, whose core has processes of its own. Each
request waits for a place (`inlay.engine.slots`), is then a request of vLLM's, and may be aborted
and resumed for another client. `loading` starts vLLM and makes the card; `pooling` makes
embeddings.

Invariants: a request that could harm vLLM or other clients is refused before vLLM has it
(`capabilities`); NaN ends its own request, and its traces are overwritten before others get the
memory (`nan_guard`, `extension`); grammars are counted before vLLM compiles them.
"""
