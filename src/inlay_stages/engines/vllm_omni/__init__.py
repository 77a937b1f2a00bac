"""vLLM-Omni behind inlay's engine protocols: pipelines that make images.

`engine.VllmOmniEngine` runs vLLM-Omni's asynchronous engine. Requests take turns, client by client,
for as many places as its scheduler has; each is then a request of vLLM-Omni's. `loading` starts it
and makes the card, `arguments` gives it the words after `--`, `prompts` writes requests as it takes
them. Checks, jobs and files of images are those of `inlay_stages.engines.diffusers`.

Invariants: what vLLM-Omni would answer with something else than was asked for is refused before it
has the request, or is an error; a request that ends, in whatever way, is aborted there; weights are
safetensors, and code is vLLM-Omni's, diffusers' and transformers' own.
"""
