"""Comparison of a loaded model with its own code in transformers, at every start.

An engine that replaces modules of a model must be unable to serve other numbers than the model's.
Three rings, from cheap to dear:

- `modules`: each replaced module against the one it replaces, on inputs captured from the model's
  own pass, per element. One that differs is left as it was.
- `judgement`: each decoder layer given the model's own input, and the whole real path (chunks, a
  batch over scattered pages, decoding, embedding vectors), by the distance to the model's own
  logits over the rounding noise of these at the same position.
- `shadow`: the same structure with small random weights in float32, where rounding hides nothing.

`reference` runs the model's own code, before anything of it is replaced.
"""
