"""transformers' own processors of every family, made from settings alone, and a model directory for each.

A processor that needs torchvision only for its video half is made without its `__init__`.
"""

import ast
import collections
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import BatchFeature, PreTrainedTokenizerFast
from transformers.image_transforms import group_images_by_shape, reorder_images, split_to_tiles
from transformers.image_utils import SizeDict
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.processing_utils import MultiModalData

from inlay.media.families import spec_of
from inlay.media.geometry import Layout
from inlay.media.spec import MediaSpec
from tests.scratch import scratch


def tokenizer(specials: Sequence[str], **named: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with special tokens, some of them under a name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    signs = {sign: id_ for id_, sign in enumerate([*alphabet, "ĊĊ"])}
    inner = Tokenizer(models.BPE(signs, [("Ċ", "Ċ")]))  # two ends of lines are one token
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*specials, *(set(named.values()) - set(specials))])
    return PreTrainedTokenizerFast(tokenizer_object=inner, extra_special_tokens=dict(named))


@dataclass
class Case:
    """One family with certain settings.

    Attributes:
        spec: as inlay reads it from files.
        tokens: transformers' number of positions of an image of (height, width), by its own arithmetic.
        ids: transformers' token ids of a real image of (height, width); `given` makes of it what its
            processor is given.
        text: ids of the texts that a family puts before and after.
    """

    spec: MediaSpec
    tokens: Callable[[int, int], int]
    ids: Callable[..., list[int]]
    text: tuple[list[int], list[int]] = ([], [])

    def flat(self, laid: Layout) -> list[int]:
        """The ids of a layout's positions, with transformers' for every row."""
        found = list(self.text[0])
        for part in laid.parts:
            found += [self.spec.image_token] * part if isinstance(part, int) else part.ids
        return found + self.text[1]


def make(
    family: str,
    processor: Any,
    image_processor: Any,
    tokens: PreTrainedTokenizerFast,
    *,
    config: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    nested: bool = True,
    image_settings: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> Case:
    """A case whose processor is a class, made without its `__init__`, or an instance."""
    directory = scratch("processor")
    if isinstance(processor, type):
        made: Any = object.__new__(processor)
        made.image_processor, made.tokenizer = image_processor, tokens
        for name, value in attributes.items():
            setattr(made, name, value)
        processor = made
    tokens.save_pretrained(directory)
    _write(directory, "config.json", {"model_type": family, **(config or {})})
    image = image_processor.to_dict() if image_settings is None else image_settings
    if nested:
        _write(directory, "processor_config.json", {**(settings or {}), "image_processor": image})
    else:
        _write(directory, "preprocessor_config.json", image)
        _write(directory, "processor_config.json", dict(settings or {}))
    spec = spec_of(directory)
    assert spec is not None

    placeholder = spec.placeholders["image"]
    before, after = (
        list(tokens(text, add_special_tokens=False).input_ids)
        for text in (placeholder.before, placeholder.after)
    )

    def count(height: int, width: int) -> int:
        found = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        return int(found["num_image_tokens"][0])

    def ids(
        height: int, width: int, given: Callable[[Any], list[Any]] = lambda picture: [picture]
    ) -> list[int]:
        picture = np.zeros((3, height, width), np.uint8)
        found = image_processor(
            given(picture), return_tensors="np", **getattr(processor, "images_kwargs", {})
        )
        return list(
            tokens(processor.replace_image_token(found, 0), add_special_tokens=False).input_ids
        )

    return Case(spec, count, ids, (before, after))


def _write(directory: Path, name: str, value: Mapping[str, Any]) -> None:
    (directory / name).write_text(json.dumps(value, default=list), encoding="utf-8")


def llava(side: int = 224, patch: int = 14, strategy: str = "default", extra: int = 1) -> Case:
    image = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    tokens = tokenizer(["<image>"])
    settings = {
        "patch_size": patch,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": extra,
    }
    return make(
        "llava", LlavaProcessor(image, tokens, **settings), image, tokens, settings=settings
    )


def llava_from_the_model(side: int, patch: int, strategy: str) -> Case:
    """One whose processor says nothing, as older repositories have it: the model's configuration decides."""
    case = llava(side, patch, strategy)
    image = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    tokens = tokenizer(["<image>"])
    vision = {"model_type": "clip_vision_model", "patch_size": patch}
    read = make(
        "llava",
        LlavaProcessor,
        image,
        tokens,
        config={"vision_config": vision, "vision_feature_select_strategy": strategy},
        nested=False,
    )
    return Case(read.spec, case.tokens, case.ids)


def llava_next(tile: int, patch: int, canvases: list[list[int]]) -> Case:
    image = LlavaNextImageProcessorPil(
        size={"shortest_edge": tile},
        crop_size={"height": tile, "width": tile},
        image_grid_pinpoints=canvases,
    )
    tokens = tokenizer(["<image>"])
    settings = {
        "patch_size": patch,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return make(
        "llava_next",
        LlavaNextProcessor(image, tokens, **settings),
        image,
        tokens,
        settings=settings,
    )


def llava_onevision(tile: int, rows: int, lines: int, tiles: int) -> Case:
    canvases = [[tile * y, tile * x] for y in range(1, lines + 1) for x in range(1, lines + 1)]
    image = LlavaOnevisionImageProcessorPil(
        size={"height": tile, "width": tile}, image_grid_pinpoints=canvases
    )
    tokens = tokenizer(["<image>", "<video>"])
    settings: dict[str, Any] = {
        "num_image_tokens": rows,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": f"anyres_max_{tiles}",
    }
    return make(
        "llava_onevision",
        LlavaOnevisionProcessor,
        image,
        tokens,
        settings=settings,
        image_token="<image>",
        **settings,
    )


def qwen2_vl(family: str, patch: int, least: int, most: int, nested: bool = True) -> Case:
    image = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": least, "longest_edge": most}
    )
    tokens = tokenizer(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    return make(family, Qwen2VLProcessor, image, tokens, nested=nested, image_token="<|image_pad|>")


def qwen2_5_omni(patch: int, least: int, most: int) -> Case:
    image = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": least, "longest_edge": most}
    )
    tokens = tokenizer(["<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"])
    # As published, the model's own configuration is one part of three.
    config = {"thinker_config": {"model_type": "qwen2_5_omni_thinker", "vision_config": {}}}
    return make(
        "qwen2_5_omni",
        Qwen2_5OmniProcessor,
        image,
        tokens,
        config=config,
        nested=False,
        image_token="<|IMAGE|>",
    )


def glm4v(patch: int, least: int, most: int, family: str = "glm4v") -> Case:
    image = Glm4vImageProcessorPil(
        patch_size=patch, size={"shortest_edge": least, "longest_edge": most}
    )
    tokens = tokenizer(["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"])
    return make(family, Glm4vProcessor, image, tokens, image_token="<|image|>")


def internvl(tile: int, most: int, rows: int) -> Case:
    image = GotOcr2ImageProcessorPil(
        size={"height": tile, "width": tile}, max_patches=most, crop_to_patches=True
    )
    names: dict[str, Any] = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    tokens = tokenizer([], **names)
    return make(
        "internvl",
        InternVLProcessor,
        image,
        tokens,
        settings={"image_seq_length": rows},
        image_seq_length=rows,
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
    )


def from_source(module: str, *names: str, **given: Any) -> dict[str, Any]:
    """Functions of a module that cannot be imported without torchvision, none of which uses it."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "models" / module).read_text(encoding="utf-8")
    kept = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    for node in kept:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    assert len(kept) == len(names)
    space = {"math": math, "np": np, "torch": torch, "defaultdict": collections.defaultdict}
    made: dict[str, Any] = {}
    exec(compile(ast.Module([*kept], []), module, "exec"), space | given, made)
    space.update(given | made)
    for function in made.values():
        function.__globals__.update(space)
    return made


class _Pixtral:
    """The parts of transformers' PixtralProcessor that count."""

    def __init__(self, image_processor: Any, patch_size: int, spatial_merge_size: int) -> None:
        self.image_processor = image_processor
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token = "[IMG]"
        self.image_break_token, self.image_end_token = "[IMG_BREAK]", "[IMG_END]"
        side = patch_size * spatial_merge_size
        self.images_kwargs = {"patch_size": {"height": side, "width": side}}
        self._functions = from_source(
            "pixtral/processing_pixtral.py",
            "replace_image_token",
            "_get_num_multimodal_tokens",
            MultiModalData=MultiModalData,
            get_resize_output_image_size=lambda image, **settings: get_resize_output_image_size(
                image, input_data_format="channels_last", **settings
            ),
        )

    def _merge_kwargs(self) -> dict[str, Any]:
        return {"images_kwargs": {}}

    def replace_image_token(self, found: Any, index: int) -> Any:
        return self._functions["replace_image_token"](self, found, index)

    def _get_num_multimodal_tokens(self, image_sizes: Any) -> Any:
        return self._functions["_get_num_multimodal_tokens"](self, image_sizes)


def pixtral(family: str, patch: int, merge: int, longest: int, told: bool = True) -> Case:
    image = PixtralImageProcessorPil(size={"longest_edge": longest}, patch_size=patch)
    tokens = tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    vision = {"model_type": "pixtral", "patch_size": patch}
    settings = {"patch_size": patch, "spatial_merge_size": merge}
    return make(
        family,
        _Pixtral(image, patch, merge),
        image,
        tokens,
        config={"vision_config": vision, "spatial_merge_size": merge},
        settings=settings if told else {},
    )


def idefics3(family: str, longest: int, tile: int, rows: int, *, names: bool = True) -> Case:
    kind, maker = (
        (Idefics3Processor, Idefics3ImageProcessorPil)
        if family == "idefics3"
        else (SmolVLMProcessor, SmolVLMImageProcessorPil)
    )
    image = maker(size={"longest_edge": longest}, max_image_size={"longest_edge": tile})
    lines = range(1, 8 if names else 1)
    named = [f"<row_{line}_col_{column}>" for line in lines for column in lines]
    specials = ["<fake_token_around_image>", "<image>", "<global-img>", *named]
    return make(
        family,
        kind,
        image,
        tokenizer(specials),
        settings={"image_seq_len": rows},
        image_seq_len=rows,
        fake_image_token="<fake_token_around_image>",
        image_token="<image>",
        global_image_tag="<global-img>",
        global_image_token="<global-img>",
    )


class _Llama4Images:
    """The sizes that transformers' Llama4ImageProcessor cuts into tiles, without its pixels."""

    def __init__(self, tile: int, max_patches: int, resize_to_max_canvas: bool) -> None:
        self._tile, self._largest = tile, resize_to_max_canvas
        functions = from_source(
            "llama4/image_processing_llama4.py",
            "get_factors",
            "find_supported_resolutions",
            "get_best_fit",
        )
        size = SizeDict(height=tile, width=tile)
        self._sizes = torch.tensor(functions["find_supported_resolutions"](max_patches, size))
        self._best = functions["get_best_fit"]

    def __call__(self, pictures: list[Any], **_: Any) -> dict[str, Any]:
        canvas = self._best(pictures[0].shape[-2:], self._sizes, self._largest)
        return {
            "pixel_values": [np.empty((3, self._tile, self._tile))],
            "aspect_ratios": [[int(side) // self._tile for side in canvas]],
        }


def llama4(tile: int, most: int, largest: bool = False) -> Case:
    image = _Llama4Images(tile, most, largest)
    names = ("image_start", "image_end", "image", "patch", "tile_x_separator", "tile_y_separator")
    tokens = tokenizer([f"<|{name}|>" for name in names])
    found = make(
        "llama4",
        Llama4Processor,
        image,
        tokens,
        settings={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        image_settings={
            "size": {"height": tile, "width": tile},
            "max_patches": most,
            "resize_to_max_canvas": largest,
        },
        patch_size=14,
        downsample_ratio=4,
    )

    def count(height: int, width: int) -> int:
        return len(found.ids(height, width))

    return Case(found.spec, count, found.ids, found.text)


def llama4_pixels(
    images: Sequence[Any], tile: int, max_patches: int, norm: Sequence[list[float]]
) -> torch.Tensor:
    """The tiles of RGB pictures, by transformers' code over torch's operations for torchvision's.

    `tests/engines/vllm/test_pixels.py` compares with torchvision where that is installed.
    """

    def resize(pixels: torch.Tensor, size: SizeDict, resample: object) -> torch.Tensor:
        del resample
        sides = [size.height, size.width]
        return functional.interpolate(pixels, sides, mode="bilinear", antialias=True)

    def normalize(pixels: torch.Tensor, *norm: list[float]) -> torch.Tensor:
        mean, std = (torch.tensor(each, dtype=pixels.dtype).view(3, 1, 1) for each in norm)
        return (pixels - mean) / std

    def pad(pixels: torch.Tensor, padding: list[int], fill: object) -> torch.Tensor:
        del fill
        left, top, right, bottom = padding
        return functional.pad(pixels, (left, right, top, bottom))

    made = from_source(
        "llama4/image_processing_llama4.py",
        "get_factors",
        "get_max_res_without_distortion",
        "find_supported_resolutions",
        "pad_to_best_fit",
        "get_best_fit",
        "rescale_and_normalize",
        "_preprocess",
        tvF=SimpleNamespace(pad=pad),
        SizeDict=SizeDict,
        BatchFeature=BatchFeature,
        group_images_by_shape=group_images_by_shape,
        reorder_images=reorder_images,
        split_to_tiles=split_to_tiles,
    )
    steps = partial(made["rescale_and_normalize"], SimpleNamespace(normalize=normalize))
    found: Any = made["_preprocess"](
        SimpleNamespace(resize=resize, rescale_and_normalize=steps),
        [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images],
        do_resize=True,
        size=SizeDict(height=tile, width=tile),
        resample=None,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=norm[0],
        image_std=norm[1],
        max_patches=max_patches,
        resize_to_max_canvas=False,
        disable_grouping=None,
        return_tensors=None,
    )
    return torch.cat([*found["pixel_values"]])


def gemma3(rows: int) -> Case:
    image = Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, do_pan_and_scan=False)
    names: dict[str, Any] = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokens = tokenizer([], **names)
    processor = Gemma3Processor(image, tokens, image_seq_length=rows)
    found = make("gemma3", processor, image, tokens, settings={"image_seq_length": rows})

    def count(height: int, width: int) -> int:
        return found.tokens(height, width) + 2  # it leaves the markers out

    return Case(found.spec, count, found.ids, found.text)


def gemma4(patch: int, rows: int) -> Case:
    image = Gemma4ImageProcessorPil(patch_size=patch, max_soft_tokens=rows)
    names: dict[str, Any] = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
    }
    tokens = tokenizer([], **names)
    found = make("gemma4", Gemma4Processor, image, tokens, **names)

    def count(height: int, width: int) -> int:
        return found.tokens(height, width) + 2

    return Case(found.spec, count, found.ids, found.text)
