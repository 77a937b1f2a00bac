"""Fields of a transcription's form."""

from typing import NamedTuple

from inlay.api.openai.schema.transcriptions import Task
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.form import FieldForm
from inlay.http.quoting import shown_value

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
_MAX_TEXT = 4096
_TRUE, _FALSE = ("true", "True", "1"), ("false", "False", "0")


class TranscriptionForm(NamedTuple):
    """A request, as its form has it.

    Attributes:
        task: of the route.
        model: served name; None for the first model that fits.
        language: of the sound, in words or as a code; None if it is not known.
        prompt: what is to be kept in mind.
        form: of `FORMATS`.
        temperature: of sampling.
        seed: of sampling.
        stream: answer with events.
        max_tokens: of the answer to a piece.
    """

    task: Task
    model: str | None
    language: str | None
    prompt: str | None
    form: str
    temperature: float
    seed: int | None
    stream: bool
    max_tokens: int | None


def wanted(form: FieldForm, task: Task) -> TranscriptionForm:
    """Read a form.

    Raises:
        InvalidRequestError: a value that is not allowed, or what a model of text cannot know.
    """
    kind = form.text("response_format") or "json"
    if kind not in FORMATS:
        more = ": who speaks is not known" if kind == "diarized_json" else ""
        raise InvalidRequestError(
            f"response_format must be one of {', '.join(FORMATS)}, got {shown_value(kind)}{more}",
            param="response_format",
        )
    for unit in form.many("timestamp_granularities"):
        if unit != "segment":
            more = ": the times of words are not known to this model" if unit == "word" else ""
            raise InvalidRequestError(
                f"timestamp_granularities[] must be segment, got {shown_value(unit)}{more}",
                param="timestamp_granularities",
            )
    if form.many("include"):
        raise InvalidRequestError(
            "include: logprobs of a transcription are not shown", param="include"
        )
    chunking = form.text("chunking_strategy")
    if chunking not in (None, "", "auto") or form.group("chunking_strategy"):
        raise InvalidRequestError(
            "chunking_strategy must be auto: sound is cut where it is quiet",
            param="chunking_strategy",
        )
    streams = form.text("stream") or "false"
    if streams not in (*_TRUE, *_FALSE):
        raise InvalidRequestError(f"stream must be true or false, got {shown_value(streams)}",
            param="stream")  # fmt: skip
    stream = streams in _TRUE
    if stream and (task == "translate" or kind not in ("json", "text")):
        raise InvalidRequestError(
            "stream is for transcriptions in response_format json or text", param="stream"
        )
    language = form.text("language") or None
    if language is not None and (task == "translate" or not _is_name(language)):
        raise InvalidRequestError(
            "language must be a code or a name of letters, as 'en' or 'English', and only of a "
            f"transcription; got {shown_value(language)}",
            param="language",
        )
    prompt = form.text("prompt") or None
    if prompt is not None and len(prompt) > _MAX_TEXT:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} characters; at most {_MAX_TEXT}", param="prompt"
        )
    return TranscriptionForm(
        task,
        form.text("model") or None,
        language,
        prompt,
        kind,
        _number(form, "temperature", 0.0, 2.0) or 0.0,
        _whole(form, "seed", 0),
        stream,
        _whole(form, "max_completion_tokens", 1),
    )


def _is_name(language: str) -> bool:
    return len(language) <= 32 and language.replace("-", "").replace(" ", "").isalpha()


def _number(form: FieldForm, name: str, least: float, most: float) -> float | None:
    text = form.text(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise InvalidRequestError(
            f"{name} must be a number from {least:g} to {most:g}, got {shown_value(text)}",
            param=name,
        )
    return value


def _whole(form: FieldForm, name: str, least: int) -> int | None:
    value = _number(form, name, least, 2**31)
    if value is not None and not value.is_integer():
        raise InvalidRequestError(
            f"{name} must be a whole number, got {shown_value(form.text(name))}", param=name
        )
    return None if value is None else int(value)
