"""Training of the bundled pipeline that draws: captions, a writer, a denoiser and their files."""
