"""The engine of images: diffusion pipelines in diffusers' format, whole or one part of them.

A prompt goes through three parts: text encoders make tensors of it, the denoiser makes latents of
noise in some tens of steps, the VAE makes pixels of them. A worker has all of them or one
(`--part`), and loads no other's weights.

- `facts.py` reads the configuration files: sizes, defaults, shapes. No torch.
- `families` is what pipelines differ in; `loading.py` loads the components of a part.
- `denoising.py` is one step of many paintings, `image_pipeline.py` what is computed for a request.
- `turns.py` chooses which jobs share a step; `job.py` is a request in progress; `checks.py` the
  bounds of one; `engine.py` (`DiffusersEngine`) joins them, on the event loop.

Invariants: an image is the one that diffusers' own pipeline makes of the same seed on a CPU, alone
or in any batch, but for rounding (at most 1 of 255); a request that ends, in whatever way, leaves
with the step that runs; what is loaded is safetensors and code of diffusers and transformers alone.
"""
