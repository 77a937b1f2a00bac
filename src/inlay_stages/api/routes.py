"""Routes of pipelines: images and speech."""

from inlay.http.app import Routes
from inlay.http.openapi import Operation
from inlay.media.sound_files import MEDIA_TYPES
from inlay_stages.api.images import images
from inlay_stages.api.schema.images import ImageEvent, ImagesRequest, ImagesResponse
from inlay_stages.api.schema.speech import SpeechEvent, SpeechRequest
from inlay_stages.api.speech import speech

ROUTES: Routes = (
    (
        Operation("POST", "/v1/images/generations", "Images of a prompt.",
            ImagesRequest, ImagesResponse, ImageEvent, multipart=True),
        images,
    ),
    (
        Operation("POST", "/v1/audio/speech", "Speak a text, which may hold embeddings.",
            SpeechRequest, event=SpeechEvent, multipart=True, answers=MEDIA_TYPES),
        speech,
    ),
)  # fmt: skip
