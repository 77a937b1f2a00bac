"""Routes of images and speech: from a request to the stages that answer it, and their answers.

`POST /v1/images/generations`, `POST /v1/audio/speech`; nothing is computed here.
"""
