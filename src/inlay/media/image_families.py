"""Layouts of images of each family, read from a model's configuration files."""

import math
from collections.abc import Callable

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.media.geometry import AnyResolution, FixedSize, PatchGrid
from inlay.media.model_files import ModelFiles, Section
from inlay.media.spec import ImageGeometry, MediaSpec, Placeholder
from inlay.media.tiles import SPLIT_MAX_SIDE, Canvas, ChunkTiles, Lines, Pooled, Split


def placeholder_of(files: ModelFiles, default: str, *, key: str = "image_token") -> Placeholder:
    """The placeholder that the processor's or the tokenizer's settings name, or `default`.

    Raises:
        InvalidRequestError: the vocabulary lacks it.
    """
    text = files.processor.text(key) or files.named_token(key, default)
    return Placeholder(text, files.token(text))


def _spec(
    files: ModelFiles,
    geometry: ImageGeometry,
    placeholder: str = "<image>",
    *,
    mrope: bool = False,
    deepstack: int = 0,
    atomic: bool = False,
) -> MediaSpec:
    """A spec of images alone, whose rows have the placeholder's id."""
    found = placeholder_of(files, placeholder)
    return MediaSpec(
        family="",
        encoder_id="",
        placeholders={"image": found},
        image=geometry,
        image_token=found.id,
        mrope=mrope,
        deepstack=deepstack,
        atomic=atomic,
    )


def _patch(files: ModelFiles, default: int = 14) -> int:
    return files.processor.integer("patch_size", files.vision.integer("patch_size", default))


def _class_tokens(files: ModelFiles) -> tuple[int, int]:
    """Rows beside the patches (a class token), and those of them that are dropped."""
    default = int(files.vision.text("model_type", "clip_vision_model") == "clip_vision_model")
    strategy = files.processor.text("vision_feature_select_strategy") or files.config.text(
        "vision_feature_select_strategy", "default"
    )
    if strategy not in ("default", "full"):
        raise InvalidRequestError(
            f"vision_feature_select_strategy is {strategy!r}; allowed: 'default', 'full'"
        )
    extra = files.processor.integer("num_additional_image_tokens", default, minimum=0)
    return extra, int(strategy == "default")


def _crop(image: Section) -> tuple[int, int]:
    """Size of what the encoder sees, in pixels."""
    cropped = image.get("do_center_crop") is not False and image.get("crop_size") is not None
    return image.size("crop_size" if cropped else "size")


def _llava(files: ModelFiles) -> MediaSpec:
    image = files.image.over({"size": {"shortest_edge": 224}})
    height, width = _crop(image)
    size = image.get("size")
    kept = isinstance(size, dict) and size.get("height") is None and size.get("shortest_edge")
    patch = _patch(files)
    extra, dropped = _class_tokens(files)
    rows = (height // patch) * (width // patch) + extra - dropped
    shorter_side = image.size()[0] if kept or isinstance(size, int) else None
    return _spec(files, FixedSize(height=height, width=width, rows=rows, shorter_side=shorter_side))


_NEXT_CANVASES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def _canvases(image: Section) -> tuple[tuple[int, int], ...]:
    canvases = image.get("image_grid_pinpoints")
    try:
        return msgspec.convert(canvases, tuple[tuple[int, int], ...])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"image_grid_pinpoints: {error}") from error


def _llava_next(files: ModelFiles) -> MediaSpec:
    image = files.image.over(
        {"size": {"shortest_edge": 224}, "image_grid_pinpoints": _NEXT_CANVASES}
    )
    tile = _crop(image)[0]
    side = tile // _patch(files)
    extra, dropped = _class_tokens(files)
    return _spec(
        files,
        AnyResolution(
            tile=tile,
            side=side,
            base_rows=side**2 + extra,
            canvases=_canvases(image),
            dropped=dropped,
        ),
    )


def _llava_onevision(files: ModelFiles) -> MediaSpec:
    grid = [[384 * lines, 384 * columns] for lines in range(1, 7) for columns in range(1, 7)]
    image = files.image.over({"size": {"height": 384, "width": 384}, "image_grid_pinpoints": grid})
    tile = min(image.size())
    rows = files.processor.integer("num_image_tokens", (tile // _patch(files)) ** 2)
    aspect = files.processor.text("vision_aspect_ratio") or files.config.text(
        "vision_aspect_ratio", "anyres_max_9"
    )
    kind, _, tiles = aspect.rpartition("_")
    if kind != "anyres_max" or not tiles.isdecimal():
        raise InvalidRequestError(f"vision_aspect_ratio is {aspect!r}; allowed: 'anyres_max_N'")
    _, dropped = _class_tokens(files)
    return _spec(
        files,
        AnyResolution(
            tile=tile,
            side=math.isqrt(rows),
            base_rows=rows,
            canvases=_canvases(image),
            max_tiles=int(tiles),
            dropped=dropped,
        ),
    )


def area_of(settings: Section) -> tuple[int, int]:
    """Smallest and largest area in pixels, by any of the names that they have had.

    Raises:
        InvalidRequestError: one is no positive integer.
    """
    size = settings.section("size")

    def bound(old: str, new: str) -> int:
        if settings.get(old) is not None:
            return settings.integer(old)
        return size.integer(old) if size.get(new) is None else size.integer(new)

    return bound("min_pixels", "shortest_edge"), bound("max_pixels", "longest_edge")


def qwen_vl(files: ModelFiles, placeholder: str = "<|image_pad|>") -> MediaSpec:
    """The spec of a model that sees images as Qwen2-VL does."""
    settings = files.image.over(
        {
            "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
            "patch_size": 14,
            "merge_size": 2,
        }
    )
    least, most = area_of(settings)
    geometry = PatchGrid(
        patch=settings.integer("patch_size"),
        merge=settings.integer("merge_size"),
        min_pixels=least,
        max_pixels=most,
    )
    levels = files.vision.get("deepstack_visual_indexes")
    deepstack = len(levels) if isinstance(levels, list) else 0
    return _spec(files, geometry, placeholder, mrope=True, deepstack=deepstack)


def _qwen3_vl(files: ModelFiles) -> MediaSpec:
    spec = qwen_vl(files)
    if files.vision.get("deepstack_visual_indexes") is None:
        return msgspec.structs.replace(spec, deepstack=3)
    return spec


def _glm4v(files: ModelFiles) -> MediaSpec:
    settings = files.image.over(
        {
            "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
        }
    )
    least, most = area_of(settings)
    geometry = PatchGrid(
        patch=settings.integer("patch_size"),
        merge=settings.integer("merge_size"),
        min_pixels=least,
        max_pixels=most,
        frames=settings.integer("temporal_patch_size"),
        enlarge=True,
    )
    return _spec(files, geometry, "<|image|>", mrope=True)


def _internvl(files: ModelFiles) -> MediaSpec:
    settings = files.image.over(
        {"size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12}
    )
    geometry = Canvas(
        tile=settings.size(),
        rows=files.processor.integer(
            "image_seq_length", files.config.integer("image_seq_length", 256)
        ),
        min_tiles=settings.integer("min_patches"),
        max_tiles=_few(settings, "max_patches"),
        start=files.token(files.named_token("start_image_token", "<img>")),
        end=files.token(files.named_token("end_image_token", "</img>")),
    )
    return _spec(files, geometry, files.named_token("context_image_token", "<IMG_CONTEXT>"))


def _pixtral(files: ModelFiles) -> MediaSpec:
    settings = files.image.over({"size": {"longest_edge": 1024}})
    merge = files.processor.integer(
        "spatial_merge_size", files.config.integer("spatial_merge_size", 1)
    )
    height, width = settings.size()
    geometry = Lines(
        patch=_patch(files, 16) * merge,
        max_height=height,
        max_width=width,
        line_end=files.token(files.processor.text("image_break_token", "[IMG_BREAK]")),
        end=files.token(files.processor.text("image_end_token", "[IMG_END]")),
    )
    return _spec(files, geometry, "[IMG]")


def _llava_or_pixtral(files: ModelFiles) -> MediaSpec:
    pixtral = files.vision.text("model_type") == "pixtral"
    return _pixtral(files) if pixtral else _llava(files)


def _idefics3(files: ModelFiles) -> MediaSpec:
    settings = files.image.over(
        {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}}
    )
    longest = settings.section("size").integer("longest_edge")
    tile = settings.section("max_image_size").integer("longest_edge")
    # One line more than the sides need: a side is rounded up to an even number of pixels.
    lines = range(1, min(longest, SPLIT_MAX_SIDE) // tile + 3)
    around = files.named_token("fake_image_token", "<fake_token_around_image>")
    image = files.named_token("image_token", "<image>")

    def marker(text: str) -> tuple[int, ...]:
        return files.encode(f"{around}{text}{image}")[1:-1]

    geometry = Split(
        longest=longest,
        tile=tile,
        rows=files.processor.integer("image_seq_len", 169),
        cut=settings.get("do_image_splitting") is not False,
        around=files.token(around),
        names=tuple(
            tuple(marker(f"<row_{line}_col_{column}>") for column in lines) for line in lines
        ),
        whole=marker(files.named_token("global_image_token", "<global-img>")),
        line_end=marker("\n"),
        last_line_end=marker("\n\n"),
    )
    return _spec(files, geometry, image)


def _llama4(files: ModelFiles) -> MediaSpec:
    settings = files.image.over({"size": {"height": 336, "width": 336}, "max_patches": 16})
    tile, width = settings.size()
    if tile != width:
        raise InvalidRequestError(f"tiles of Llama 4 are square, got {width} x {tile} pixels")
    ratio = files.processor.number("pixel_shuffle_ratio", 0.5)
    geometry = ChunkTiles(
        tile=tile,
        rows=(tile // _patch(files)) ** 2 // round(1 / ratio**2),
        max_tiles=_few(settings, "max_patches"),
        largest=bool(settings.get("resize_to_max_canvas")),
        start=files.token("<|image_start|>"),
        column_end=files.token("<|tile_x_separator|>"),
        line_end=files.token("<|tile_y_separator|>"),
        whole=files.token("<|image|>"),
        end=files.token("<|image_end|>"),
    )
    return msgspec.structs.replace(
        _spec(files, geometry, "<|image|>"), image_token=files.token("<|patch|>")
    )


def _gemma3(files: ModelFiles) -> MediaSpec:
    settings = files.image.over({"size": {"height": 224, "width": 224}})
    if settings.get("do_pan_and_scan"):
        raise InvalidRequestError("crops of Gemma 3 (do_pan_and_scan) are not supported")
    height, width = settings.size()
    start = files.named_token("boi_token", "<start_of_image>")
    placeholder = Placeholder(start, files.token(start), "\n\n", "\n\n")
    return MediaSpec(
        family="",
        encoder_id="",
        placeholders={"image": placeholder},
        image=FixedSize(
            height=height,
            width=width,
            rows=files.processor.integer(
                "image_seq_length", files.config.integer("mm_tokens_per_image", 256)
            ),
            start=(placeholder.id,),
            end=(files.token(files.named_token("eoi_token", "<end_of_image>")),),
        ),
        image_token=files.token(files.named_token("image_token", "<image_soft_token>")),
        atomic=True,
    )


def _gemma4(files: ModelFiles) -> MediaSpec:
    settings = files.image.over(
        {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280}
    )
    most = settings.integer("max_soft_tokens")
    geometry = Pooled(
        patch=settings.integer("patch_size"),
        pool=settings.integer("pooling_kernel_size"),
        max_rows=most,
        low_rows=min(most, 70),
        start=files.token(files.named_token("boi_token", "<|image>")),
        end=files.token(files.named_token("eoi_token", "<image|>")),
    )
    attention = files.config.section("text_config").get("use_bidirectional_attention")
    return _spec(files, geometry, "<|image|>", atomic=attention == "vision")


def _few(settings: Section, key: str) -> int:
    """An integer that canvases are enumerated by, so it is bounded.

    Raises:
        InvalidRequestError: over 256.
    """
    value = settings.integer(key)
    if value > 256:
        raise InvalidRequestError(f"{settings.name} says {key} = {value}; at most 256 is supported")
    return value


IMAGE_FAMILIES: dict[str, Callable[[ModelFiles], MediaSpec]] = {
    "colqwen2": qwen_vl,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llama4": _llama4,
    "llava": _llava_or_pixtral,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "mistral3": _pixtral,
    "qwen2_5_vl": qwen_vl,
    "qwen2_vl": qwen_vl,
    "qwen3_5": qwen_vl,
    "qwen3_5_moe": qwen_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "smolvlm": _idefics3,
}
"""Reader of each family; family and identity of the encoder are left empty."""
