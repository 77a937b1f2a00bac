"""Encoders of images: a file's bytes in, rows of the language model out.

- `processing.py` makes a tower's inputs of a picture, as transformers' image processors do.
- `tower.py` runs towers and projectors, for several images at once.
- `encoder.py` joins them: `MediaEncoder` reads, encodes and caches, within a byte budget.
- `provider.py` brings rows to the requests of `TorchEngine` that need them.
- `loading.py` loads a tower alone; `engine.py` serves one as an engine, `--task encode`.

Files are decoded by `inlay.engine.pictures`, in the threads and within the bytes of
`inlay.engine.decoding`. `prompt_media.py`, beside this package, keeps the rows of a sequence.
"""
