"""Routes of images and speech: `/v1/images/generations`, `/v1/audio/speech`."""
