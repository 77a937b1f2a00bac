"""Fields that are known and not served: a request that sets one is refused.

A request type declares such a field as `Unserved`; `reason_for` finds the reason. Null is treated
as absent, and so are the values that change nothing, such as vLLM's default.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import msgspec

_MARK = msgspec.Meta(extra_json_schema={"not": {}})

Unserved: TypeAlias = Annotated[Any, _MARK]
"""The type of a field that is refused."""


def named_elsewhere(name: str) -> msgspec.Meta:
    """Mark a field of chat completions that is refused here, where another one stands for it."""
    said = f"Refused: a field of chat completions; here it is {name}."
    return msgspec.Meta(extra_json_schema={"not": {}, "description": said})


class Reason(NamedTuple):
    """Reason why a field is refused.

    Attributes:
        text: completes "FIELD is not supported: ".
        absent: values beside null that change nothing.
    """

    text: str
    absent: tuple[object, ...] = ()

    def allows(self, value: object) -> bool:
        """Return True if `value` requests nothing. 0 is not false, and 1 is not true."""
        return value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.absent
        )


_STRUCTURED = "say structured_outputs.{} instead"
_RENDER = "it is a field of vLLM's /render routes, which are not served"
_TRANSFER = "clients do not say where keys and values go"
_STATE = "inlay keeps no state between requests; "
_EXPERTS = "the experts that a token went through are not shown"
_NO_CLONES = "voices are the model's own; none is cloned"
_SIZE = "say size, as WIDTHxHEIGHT"
_NO_EDITS = "images are made from a prompt alone; none is changed"
_STILL = "images do not move"
_EMBEDS = "say prompt_embeds; in a chat it is a part of a message"
_OWN_PROMPT = "name the model's own prompt in prompt_name"
_NO_TEMPLATE = "scores are made without a chat template"

UNSERVED: Mapping[str, Reason] = {
    # OpenAI's
    "ImagesRequest.background": Reason(
        "images have the background that the model gives them: say it in the prompt", ("auto",)
    ),
    "context_management": Reason(f"{_STATE}send all that is to be kept", ([],)),
    "function_call": Reason("it was replaced by tool_choice"),
    "functions": Reason("it was replaced by tools"),
    "ResponsesRequest.image": Reason("say detail in each image"),
    "moderation": Reason("nothing is moderated", ("auto",)),
    "output_compression": Reason("files are written at one quality", (100,)),
    "quality": Reason("num_inference_steps sets the work", ("auto",)),
    "style": Reason("say it in the prompt"),
    "ResponsesRequest.prompt": Reason(
        f"{_STATE}send the template's text as instructions and input"
    ),
    "web_search_options": Reason("nobody searches the web here"),
    # Anthropic's
    "container": Reason("the server runs no code"),
    "mcp_servers": Reason("your own code calls tools; list them in tools", ([],)),
    # vLLM's
    "chat_template": Reason("the model's own is used; chat_template_kwargs sets its variables"),
    "chat_template_kwargs": Reason(_NO_TEMPLATE, ({},)),
    "documents": Reason("send chat_template_kwargs.documents to a template that reads it"),
    "ec_transfer_params": Reason(_TRANSFER, ({},)),
    "enable_response_messages": Reason("output holds all that the model wrote", (False,)),
    "input_embeds": Reason(_EMBEDS),
    "inputs_embeds": Reason(_EMBEDS),
    "kv_transfer_params": Reason(_TRANSFER, ({},)),
    "length_penalty": Reason("it weighs the outputs of a beam search, which is not served", (1.0,)),
    "media_io_kwargs": Reason("images are decoded in one way only", ({},)),
    "mm_payload": Reason(_RENDER, ("tensors",)),
    "mm_processor_kwargs": Reason(
        "the server sets them for all requests (--mm-processor-kwargs); detail is for one image, "
        "and the sound of a video is a part of its own: videos are frames (use_audio_in_video)",
        ({},),
    ),
    "padding": Reason("inputs are computed without padding", ("do_not_pad",)),
    "previous_input_messages": Reason("send the items of the conversation as input", ([],)),
    "repetition_detection": Reason(
        "outputs end by stop, stop_token_ids, an end token or max_tokens"
    ),
    "return_mm_kwargs": Reason(_RENDER, (True,)),
    "return_prompt_text": Reason(
        "return_token_ids gives the prompt's ids, /detokenize their text", (False,)
    ),
    "return_token_offsets": Reason(_RENDER, (False,)),
    "routed_experts_prompt_start": Reason(_EXPERTS, (0,)),
    "stream_interval": Reason("each event is sent as soon as there is text for it", (1,)),
    "use_beam_search": Reason(
        "there is no beam search; best_of chooses among several outputs", (False,)
    ),
    "vllm_xargs": Reason("engines take no arguments but the fields of this API", ({},)),
    "watermarking": Reason("outputs carry no watermark", (False,)),
    # OpenAI's and vLLM-Omni's, of images
    "complexity": Reason("num_inference_steps sets the work"),
    "frame_count": Reason(_STILL),
    "frame_duration_ms": Reason(_STILL),
    "height": Reason(_SIZE),
    "image": Reason(_NO_EDITS),
    "images": Reason(_NO_EDITS),
    "mask": Reason(_NO_EDITS),
    "svg": Reason("images are pixels"),
    "width": Reason(_SIZE),
    "bot_task": Reason("prompts go to the text encoder as they are"),
    "extra_params": Reason("models take no arguments but the fields of this API", ({},)),
    "flow_shift": Reason("the schedule is the model's own"),
    "generator_device": Reason("noise is drawn on the CPU, the same everywhere", ("cpu",)),
    "layers": Reason("no served model makes images in layers"),
    "lora": Reason("name an adapter in model"),
    "return_stage_metrics": Reason("usage.stages has each stage's share", (False,)),
    "system_prompt": Reason("prompts go to the text encoder as they are"),
    "true_cfg_scale": Reason("say guidance_scale instead"),
    "use_system_prompt": Reason("prompts go to the text encoder as they are"),
    "vae_use_slicing": Reason("images are decoded one at a time", (False,)),
    "vae_use_tiling": Reason("images are decoded whole", (False,)),
    # OpenAI's and vLLM-Omni's, of speech
    "speed": Reason("the model speaks at its own; instructions may ask for another", (1.0,)),
    "ambient_sound": Reason("the model speaks, and makes no other sound"),
    "duration_seconds": Reason("sound ends with the text; max_new_tokens bounds it"),
    "initial_codec_chunk_frames": Reason("the graph sets the vocoder's chunk"),
    "language": Reason("the model speaks the language of the text", ("Auto",)),
    "non_streaming_mode": Reason("a text is read whole before it is spoken"),
    "ref_audio": Reason(_NO_CLONES),
    "ref_audio_2": Reason(_NO_CLONES),
    "ref_text": Reason(_NO_CLONES),
    "sample_rate": Reason("sound has the model's own rate, 24000", (24_000,)),
    "speaker_embedding": Reason(_NO_CLONES),
    "task_type": Reason("voices are the model's own", ("CustomVoice",)),
    "word_timestamps": Reason("the times of words are not known", (False,)),
    "x_vector_only_mode": Reason(_NO_CLONES, (False,)),
    # older fields of vLLM, which it ignores now, and SGLang's
    "guided_choice": Reason(_STRUCTURED.format("choice")),
    "guided_grammar": Reason(_STRUCTURED.format("grammar")),
    "guided_json": Reason(_STRUCTURED.format("json")),
    "guided_regex": Reason(_STRUCTURED.format("regex")),
    "ebnf": Reason(_STRUCTURED.format("grammar")),
    "json_schema": Reason(_STRUCTURED.format("json")),
    "regex": Reason(_STRUCTURED.format("regex")),
    # embeddings
    "inputs": Reason("say input"),
    "EmbedRequest.inputs": Reason("say texts"),
    "EmbedRequest.images": Reason("send a chat with images to /v1/embeddings"),
    "PromptsRequest.prompt": Reason(
        "say input; prompt_name puts a prompt of the model's own before it"
    ),
    "PromptsRequest.task": Reason(_OWN_PROMPT),
    "data": Reason("there are no IO processor plugins; give input, messages or prompt_embeds"),
    "dimensions": Reason("/pooling gives vectors whole, as in vLLM; /v1/embeddings shortens them"),
}
"""The refused fields of all requests, by name, or by type and name."""


def reason_for(request: type, name: str) -> Reason:
    """Return why a field of a request type is refused."""
    for kind in request.__mro__:
        found = UNSERVED.get(f"{kind.__name__}.{name}")
        if found is not None:
            return found
    return UNSERVED[name]


@cache
def unserved(request: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of the refused fields of a request type."""
    hints = get_type_hints(request, include_extras=True)
    return tuple(
        name
        for name in request.__struct_fields__
        if _MARK in getattr(hints[name], "__metadata__", ())
    )
