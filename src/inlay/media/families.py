"""Families of models that take media, and the `MediaSpec` of each from its configuration files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.media.audio import AudioChunks, AudioFrames
from inlay.media.geometry import MAX_PIXELS, PatchGrid
from inlay.media.image_families import IMAGE_FAMILIES, area_of, placeholder_of, qwen_vl
from inlay.media.model_files import ModelFiles, Section
from inlay.media.spec import ImageGeometry, Kind, MediaSpec, Placeholder
from inlay.media.video import FrameGrid

REFUSED = {
    "paligemma": "attention in its whole prompt, text too, is bidirectional",
    "mllama": "its language model attends to images in layers of their own, not to rows",
    "phi4_multimodal": "its language model takes ids and pixels, not rows",
    "gemma3n": "its vision encoder is a model of another library (timm)",
}
"""Families with media that are not served, with the reason."""

PROCESSOR_KWARGS = frozenset(
    {
        "do_image_splitting", "max_patches", "max_pixels", "max_soft_tokens", "min_patches",
        "min_pixels", "size",
    }
)  # fmt: skip
"""Settings that decide the rows of an image, and that `MediaSpec.processor_settings` passes on."""


def spec_of(
    directory: Path,
    *,
    weights_id: str = "",
    backend: str = "pil",
    max_pixels: int = MAX_PIXELS,
    max_items: dict[Kind, int] | None = None,
    video: bool = False,
    processor_kwargs: Mapping[str, Any] | None = None,
) -> MediaSpec | None:
    """The facts about a model's media, or None where it takes none.

    Args:
        directory: of the model's files.
        weights_id: identity of the model's weights, which the encoder's are part of.
        backend: of the image processor, as it decides pixels and so rows.
        max_pixels: largest area of an image.
        max_items: most items of a kind in one prompt.
        processor_kwargs: settings of the image processor in place of the files' own, of those in
            `PROCESSOR_KWARGS` that the family has.
        video: videos too, where the model takes them; most engines cannot read them.

    Raises:
        InvalidRequestError: a family with media that is not supported, or configuration files that
            lack what its layout needs.
    """
    files = ModelFiles(directory)
    if processor_kwargs:
        named = f"{files.image.name} with --mm-processor-kwargs"
        own = {**files.image.values}
        if "size" in processor_kwargs:
            # Older names of the same, which would stand before it.
            for name in ("min_pixels", "max_pixels"):
                own.pop(name, None)
        files.image = Section(named, {**own, **processor_kwargs})
    family = files.config.text("model_type")
    if family in REFUSED:
        raise InvalidRequestError(f"models of type {family!r} are not served: {REFUSED[family]}")
    reader = _READERS.get(family)
    if reader is None:
        if any(files.config.get(key) for key in ("vision_config", "audio_config")):
            raise InvalidRequestError(
                f"the media of {family!r} models are not supported; supported: "
                f"{', '.join(sorted(_READERS))}"
            )
        return None
    spec = reader(files)
    if processor_kwargs:
        _check_kwargs(processor_kwargs, family, spec.image)
    if video and family in _VIDEO:
        spec = _with_video(files, spec, *_VIDEO[family])
    return msgspec.structs.replace(
        spec,
        family=family,
        encoder_id=files.settings_digest(weights_id, backend),
        max_pixels=max_pixels,
        max_items=max_items or {},
    )


def _check_kwargs(given: Mapping[str, Any], family: str, geometry: ImageGeometry | None) -> None:
    """Raise `InvalidRequestError` for settings that do not decide the rows of a family's images.

    What is not passed on to the processor would make a layout that it does not follow.
    """
    passed_on = {} if geometry is None else geometry.settings()
    allowed = PROCESSOR_KWARGS & passed_on.keys()
    if isinstance(geometry, PatchGrid):
        allowed |= {"min_pixels", "max_pixels"}
    unknown = given.keys() - allowed
    if unknown:
        raise InvalidRequestError(
            f"the image processor of a {family!r} model is not told "
            f"{', '.join(sorted(unknown))[:200]}; allowed: {', '.join(sorted(allowed)) or 'none'} "
            "(--mm-processor-kwargs)"
        )


def _qwen2_audio(files: ModelFiles) -> MediaSpec:
    settings = files.audio.over({"sampling_rate": 16000, "hop_length": 160, "chunk_length": 30})
    rate = settings.integer("sampling_rate")
    placeholder = placeholder_of(files, "<|AUDIO|>", key="audio_token")
    return MediaSpec(
        family="",
        encoder_id="",
        placeholders={"audio": placeholder},
        audio=AudioFrames(
            rate=rate,
            hop=settings.integer("hop_length"),
            max_samples=settings.integer("chunk_length") * rate,
        ),
        audio_token=placeholder.id,
    )


def _qwen2_5_omni(files: ModelFiles) -> MediaSpec:
    seen, heard = qwen_vl(files, "<|IMAGE|>"), _qwen2_audio(files)
    assert isinstance(heard.audio, AudioFrames), "its sounds are laid out as Qwen2-Audio's"
    return msgspec.structs.replace(
        seen,
        placeholders={**seen.placeholders, **heard.placeholders},
        audio=msgspec.structs.replace(heard.audio, filled=False),
        audio_token=heard.audio_token,
    )


def _voxtral(files: ModelFiles) -> MediaSpec:
    settings = files.audio.over({"sampling_rate": 16000, "hop_length": 160})
    encoder = files.config.section("audio_config")
    states = encoder.integer("max_source_positions", 1500)
    # Two frames become one state; as many states as fill the projector's input become one row.
    joined = encoder.integer("intermediate_size", 5120) // encoder.integer("hidden_size", 1280)
    placeholder = placeholder_of(files, "[AUDIO]", key="audio_token")
    return MediaSpec(
        family="",
        encoder_id="",
        placeholders={"audio": placeholder},
        audio=AudioChunks(
            rate=settings.integer("sampling_rate"),
            chunk=2 * states * settings.integer("hop_length"),
            rows=states // joined,
            start=files.token(files.named_token("begin_audio_token", "[BEGIN_AUDIO]")),
        ),
        audio_token=placeholder.id,
    )


def _with_video(files: ModelFiles, spec: MediaSpec, token: str, like: FrameGrid) -> MediaSpec:
    """`spec` with videos laid out as the files say, and as `like` where they say nothing."""
    settings = files.video.over(
        {
            "size": {"shortest_edge": like.min_pixels, "longest_edge": like.max_pixels},
            "patch_size": like.patch,
            "merge_size": like.merge,
            "temporal_patch_size": like.temporal,
            "max_frames": like.max_frames,
        }
    )
    if settings.get("cap_pixels_per_frame"):
        raise InvalidRequestError("videos with cap_pixels_per_frame are not supported")
    least, most = area_of(settings)
    marked = like.stamps != "none"
    names = ("<|vision_start|>", "<|vision_end|>")
    if like.stamps == "after":
        names = ("<|begin_of_image|>", "<|end_of_image|>")
    speed = like.tokens_per_second
    if speed:
        where, name = files.vision, "tokens_per_second"
        if like.by_clock:
            where, name = files.config, "position_id_per_seconds"
        speed = where.number(name, speed)
    grid = msgspec.structs.replace(
        like,
        patch=settings.integer("patch_size"),
        merge=settings.integer("merge_size"),
        temporal=settings.integer("temporal_patch_size"),
        min_pixels=least,
        max_pixels=most,
        max_frames=settings.integer("max_frames"),
        tokens_per_second=speed,
        start=files.token(names[0]) if marked else -1,
        end=files.token(names[1]) if marked else -1,
    )
    placeholders: dict[Kind, Placeholder] = {
        **spec.placeholders,
        "video": placeholder_of(files, token, key="video_token"),
    }
    return msgspec.structs.replace(spec, video=grid, placeholders=placeholders)


_FRAMES = FrameGrid(
    patch=14,
    merge=2,
    temporal=2,
    min_pixels=128 * 28 * 28,
    max_pixels=28 * 28 * 768,
    max_frames=768,
    sampling="steps",
)
_SECONDS = msgspec.structs.replace(
    _FRAMES,
    patch=16,
    min_pixels=128 * 32 * 32,
    max_pixels=32 * 32 * 768,
    together=True,
    stamps="seconds",
    sampling="spread",
)
_VIDEO = {
    "glm4v": (
        "<|video|>",
        msgspec.structs.replace(
            _FRAMES,
            min_pixels=112 * 112,
            max_pixels=28 * 28 * 2 * 30000,
            together=True,
            stamps="after",
            sampling="seconds",
        ),
    ),
    "qwen2_vl": ("<|video_pad|>", _FRAMES),
    "qwen2_5_omni": (
        "<|VIDEO|>",
        msgspec.structs.replace(_FRAMES, tokens_per_second=25, by_clock=True),
    ),
    "qwen2_5_vl": ("<|video_pad|>", msgspec.structs.replace(_FRAMES, tokens_per_second=4)),
    "qwen3_vl": ("<|video_pad|>", _SECONDS),
    "qwen3_5": ("<|video_pad|>", _SECONDS),
}
"""Placeholder and class defaults of the video processors, by family."""


_VIDEO |= {f"{family}_moe": _VIDEO[family] for family in ("glm4v", "qwen3_vl", "qwen3_5")}

_READERS: dict[str, Callable[[ModelFiles], MediaSpec]] = {
    **IMAGE_FAMILIES,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
}
