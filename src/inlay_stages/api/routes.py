"""Routes of pipelines: images and speech."""

from inlay.http.app import Routes
from inlay.http.openapi import Operation
from inlay.media.sound_files import MEDIA_TYPES
from inlay_stages.api.images import images
from inlay_stages.api.schema.images import ImageEvent, ImagesRequest, ImagesResponse
from inlay_stages.api.schema.speech import SpeechEvent, SpeechRequest
from inlay_stages.api.speech import speech

_IMAGES = {
    "image": {"prompt": "a red fox"},
    "stream": {"prompt": "a red fox", "stream": True, "partial_images": 2, "seed": 1},
}
_READ = {"instructions": "Read the text aloud, slowly.", "stream_format": "sse"}
_SPEECH = {
    "file": {"input": "Good morning.", "voice": "Chelsie"},
    "pieces": {"input": "Good morning.", "response_format": "pcm"},
    "events": {"input": "Good morning.", **_READ},
}

ROUTES: Routes = (
    (
        Operation("POST", "/v1/images/generations", "Images of a prompt.",
            ImagesRequest, ImagesResponse, ImageEvent, multipart=True, examples=_IMAGES),
        images,
    ),
    (
        Operation("POST", "/v1/audio/speech", "Speak a text, which may hold embeddings.",
            SpeechRequest, event=SpeechEvent, multipart=True, answers=MEDIA_TYPES,
            examples=_SPEECH),
        speech,
    ),
)  # fmt: skip
