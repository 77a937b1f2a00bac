"""SGLang behind inlay's engine protocols.

`engine.SglangEngine` talks to SGLang's processes (`process`). Each request waits for a place
(`inlay.engine.slots`), is then a request of SGLang's, and may be aborted and resumed for another
client. `loading` starts SGLang and makes the card; `embedding` makes vectors.

Invariants: a request that could harm SGLang or other clients is refused before SGLang has it
(`capabilities`); stop tokens are found by inlay; the death of a process of SGLang ends its requests
with an error.
"""
