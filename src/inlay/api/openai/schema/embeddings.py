"""Types of `/v1/embeddings`, `/pooling` and `/classify`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.completions import EmbedsSource
from inlay.api.schema.described import (
    CHAT,
    QUESTION,
    CreatedAt,
    ListIndex,
    ModelName,
    NotCounted,
    PromptTokens,
    TotalTokens,
)
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import example, field


class InputsRequest(msgspec.Struct, kw_only=True):
    """Fields of all requests whose results are vectors. Names beyond OpenAI's are vLLM's.

    Attributes:
        model: served name; when absent the first model that fits the route.
        request_id: the answer's `id`, behind its prefix: 1 to 128 visible ASCII characters; random
            when absent.
        cache_salt: results are shared only under equal salts; not empty.
        priority: lower values are served first, 0 when absent; others only with --scheduling-policy
            priority.
        user: accepted; nothing depends on it.
    """

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    mm_processor_kwargs: Unserved = None


class TextsRequest(InputsRequest, kw_only=True):
    """Fields of all requests for embeddings or scores of texts.

    Attributes:
        truncate_prompt_tokens: positions of an input that are kept, special tokens included, 1 to
            the model's limit, which -1 stands for. When absent --truncate-prompt-tokens decides,
            and without it a longer input is refused.
        auto_truncate: true cuts to the model's limit, false refuses a longer input, whatever
            --truncate-prompt-tokens says; `truncate_prompt_tokens` comes first.
        truncation_side: "right" keeps the first positions, as when absent; "left" the last.
        use_activation: apply the model's last step: probabilities from logits, true when absent;
            length 1 of embeddings, the model's setting when absent.
    """

    truncate_prompt_tokens: int | None = None
    auto_truncate: bool | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None

    padding: Unserved = None


Messages: TypeAlias = list[dict[str, Any]]
PromptInput: TypeAlias = str | list[int | str | dict[str, Any] | list[int | dict[str, Any]]]


class PromptsRequest(TextsRequest, kw_only=True):
    """Fields of `/v1/embeddings`, `/pooling` and `/classify`.

    Attributes:
        input: a text, token ids, a chat's messages, or a list of one of these; each item of a list
            is an input of its own. At most --max-embedding-inputs, none of them empty.
        messages: a chat, or a list of chats, instead of `input`. Content parts are those of chat
            completions.
        prompt_embeds: inputs as embeddings, for decoders: base64 of a tensor file, a source, or a
            list of these; instead of `input`. The shape is (num_tokens, hidden size), or (batch,
            num_tokens, hidden size) for that many inputs. Needs --enable-prompt-embeds.
        add_special_tokens: add the tokenizer's special tokens around a text (true when absent), or
            around a chat, on top of its template's (false when absent); ids are taken as they are.
        add_generation_prompt: end a chat where the answer would begin (false when absent).
        continue_final_message: end a chat where the content of its last message ends (false when
            absent); not with `add_generation_prompt`.
        chat_template_kwargs: further variables for the chat template; only with a chat.
        prompt_name: name of a prompt in the model's configuration, put before every text; the
            configuration's default when absent. Refused with ids, chats and embeddings.
        role: "query" or "document": chooses the model's prompt of this name ("passage", "corpus").
            Cohere's, Jina's and Voyage's names mean the same, and a prompt's own name is taken.
        input_type: another name of `role`.
    """

    input: Annotated[PromptInput | None, example([QUESTION])] = None
    messages: Annotated[list[dict[str, Any] | Messages] | None, example(CHAT)] = None
    prompt_embeds: Annotated[
        str | EmbedsSource | list[str | EmbedsSource] | None, example({"ref": "pe-..."})
    ] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, example({"enable_thinking": False})] = (
        None
    )
    prompt_name: Annotated[str | None, example("query")] = None
    role: Annotated[str | None, example("query")] = None
    input_type: Annotated[str | None, example("search_query")] = None

    chat_template: Unserved = None
    inputs: Unserved = None
    prompt: Unserved = None
    media_io_kwargs: Unserved = None

    @property
    def chats(self) -> list[Messages]:
        """Chats in `messages`, or else in `input`; empty where it holds something else."""
        given = self.input if self.messages is None else self.messages
        if not isinstance(given, list) or not given:
            return []
        if all(isinstance(item, dict) for item in given):
            return [given]  # type: ignore[list-item]
        if all(
            isinstance(chat, list) and chat and all(isinstance(message, dict) for message in chat)
            for chat in given
        ):
            return given  # type: ignore[return-value]
        return []

    @property
    def chat_paths(self) -> list[str]:
        name = "input" if self.messages is None else "messages"
        chats = self.chats
        if chats == [getattr(self, name)]:
            return [name]
        return [f"{name}[{index}]" for index in range(len(chats))]


class EncodedRequest(PromptsRequest, kw_only=True):
    """Fields of `/v1/embeddings` and `/pooling` for the encoding of vectors.

    Attributes:
        encoding_format: "float" (when absent, unless `Accept` is application/safetensors or
            application/octet-stream): numbers in JSON; "base64": base64 in JSON; "bytes": the body
            is the vectors one after another, at most 400, described in the header `metadata`;
            "bytes_only": without the header; "safetensors": one file with all outputs.
        embed_dtype: dtype of base64 and bytes; "float32" when absent, and alone with "float". Of
            dense vectors and tokens also "int8", with a factor for each vector in `scale`, "binary"
            and "ubinary", a bit for each element in integers of 8; these with "float" too.
        endianness: byte order of base64 and bytes; "native" (the server's machine) when absent, and
            alone with "float".
    """

    encoding_format: Literal["float", "base64", "bytes", "bytes_only", "safetensors"] | None = None
    embed_dtype: (
        Literal[
            "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "binary", "ubinary"
        ]
        | None
    ) = None
    endianness: Literal["native", "big", "little"] | None = None


class ChunkingParams(msgspec.Struct, frozen=True):
    """Parts of a text."""

    chunk_size: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)], field("tokens of a part.", 128)
    ]


class EmbeddingRequest(EncodedRequest, kw_only=True):
    """A request to `/v1/embeddings`.

    Attributes:
        dimensions: number of first elements that are kept, all when absent; `/v1/models` has those
            that the model allows. The vector gets length 1 again, unless `normalize` is false.
        normalize: give vectors length 1; when absent the model's setting, and true with
            `dimensions`. vLLM's `use_activation` is the same.
        use_activation: vLLM's name of `normalize`; where both are given they must be equal.
        outputs: what each item of the answer has, of the model's `outputs` in `/v1/models`: "dense"
            is in `embedding`, "sparse", "tokens" and "token_labels" are in fields of their names.
            The model's first when absent.
        max_active: weights that are kept of a sparse vector, the largest; all when absent.
        split_long_inputs: read a text beyond the model's limit in pieces, and give the outputs of
            the whole; its item has `pieces`, and `approximate`. False when absent.
        late_chunking: Jina's field: the texts stand one after another, and each gets the mean of
            its own positions, of models that pool so. False when absent.
        late_chunking_params: vLLM's field: the same of parts of each input of `chunk_size` tokens.
        store: keep the outputs of each input, in `embed_dtype`, and answer with its `ref` in their
            place, for /v1/rerank and /v1/score. The role is "document" when absent. False when
            absent.
        task: Jina's name of `role`.
        output_dimension: Voyage's name of `dimensions`.
        output_dtype: Voyage's name of `embed_dtype`; "float" is float32.
        embedding_type: Jina's name of `embed_dtype`; "float" is float32 with `encoding_format`
            "float", "base64" is that `encoding_format`.
        normalized: Jina's name of `normalize`.
        truncation: Voyage's name of `auto_truncate`.
        truncate: Jina's name of `auto_truncate`. NVIDIA's clients send "NONE", which is false, or
            "START" or "END", which is true and names the side that is cut.
    """

    dimensions: Annotated[int | None, example(256)] = None
    normalize: bool | None = None
    outputs: Annotated[
        list[Literal["dense", "sparse", "tokens", "token_labels"]] | None,
        example(["dense", "tokens"]),
    ] = None
    max_active: Annotated[Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None, example(256)] = (
        None
    )
    split_long_inputs: bool | None = None
    late_chunking: bool | None = None
    late_chunking_params: Annotated[ChunkingParams | None, example({"chunk_size": 128})] = None
    store: bool | None = None
    task: Annotated[str | None, example("retrieval.query")] = None
    output_dimension: Annotated[int | None, example(256)] = None
    output_dtype: Literal["float", "int8", "binary", "ubinary"] | None = None
    embedding_type: Literal["float", "base64", "binary", "ubinary"] | None = None
    normalized: bool | None = None
    truncation: bool | None = None
    truncate: bool | Literal["NONE", "START", "END"] | None = None


class PoolingRequest(EncodedRequest, kw_only=True):
    """A request to `/pooling`.

    Attributes:
        task: "embed", "classify", "token_embed" or "token_classify", of which the model must do it;
            the model's first when absent.
    """

    task: Annotated[str | None, example("embed")] = None

    data: Unserved = None
    dimensions: Unserved = None


class ClassificationRequest(PromptsRequest, kw_only=True):
    """A request to `/classify`."""

    task: Unserved = None


class TextsUsage(msgspec.Struct, frozen=True):
    """Positions of all inputs. Fields that inlay does not count have vLLM's default."""

    prompt_tokens: PromptTokens
    total_tokens: TotalTokens
    completion_tokens: NotCounted = 0
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class TextsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the answers that have an element for each input."""

    id: Annotated[str, field("id of this answer.", "embd-5d0f")]
    object: Literal["list"] = "list"
    created: CreatedAt
    model: ModelName


class SparseVector(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of some ids of the vocabulary, ascending: numbers, or base64 of int32 and floats."""

    indices: Annotated[
        list[int] | str, field("ids of the vocabulary, ascending; base64 is of int32.", [12, 104])
    ]
    values: Annotated[list[float] | str, field("weight of each.", [0.84, 1.2])]


class TokenVectors(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Vectors of an input's positions.

    Attributes:
        shape: positions, and numbers of each.
        data: the vectors, or base64 of them; in `embedding` of models that give nothing else.
        scale: of int8, the factor of each vector.
        token_ids: token of each; null of embeddings and media.
        ranges: first character of each in the text, and the one behind its last; null of special
            tokens. Of inputs that are texts.
    """

    shape: Annotated[list[int], example([2, 3])]
    data: Annotated[list[list[float]] | str | None, example([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])] = (
        None
    )
    scale: Annotated[list[float] | None, example([211.6, 180.1])] = None
    token_ids: Annotated[list[int | None], example([101, 2023])]
    ranges: Annotated[list[tuple[int, int] | None] | None, example([None, [0, 4]])] = None


class TokenLabel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The likeliest class of one position; `range` is as in `TokenVectors`."""

    position: Annotated[int, field("position of the token.", 1)]
    label: Annotated[str, field("the model's name of the likeliest class.", "B-LOC")]
    score: Annotated[float, field("its probability.", 0.98)]
    token_id: Annotated[int | None, field("id of the token; null of embeddings and media.", 3000)]
    range: Annotated[
        tuple[int, int] | None, field("characters of the text, as in `ranges`.", [0, 5])
    ] = None


class Chunk(msgspec.Struct, frozen=True):
    """A part of a text, in the order of the vectors."""

    token_range: Annotated[tuple[int, int], field("first position and the one behind.", [0, 129])]
    char_range: Annotated[
        tuple[int, int] | None, field("characters of the input; null without any.", [0, 540])
    ]


class Chunking(msgspec.Struct, frozen=True):
    """The parts of a text that have a vector each."""

    strategy: Literal["fixed"]
    chunk_size: Annotated[int, field("tokens of a part.", 128)]
    input_tokens: Annotated[int, field("positions of the input.", 300)]
    chunks: Annotated[list[Chunk], field("the parts.")]


class EmbeddingData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outputs of one input.

    Attributes:
        index: of the input.
        embedding: dense vector: numbers, or base64 of them.
        scale: of int8, the factor that its elements were multiplied by.
        sparse: sparse vector.
        tokens: vectors of positions.
        token_labels: classes of positions.
        ref: id of the stored outputs, with `store`; `embedding` is empty then.
        num_vectors: vectors that are stored: 1 unless they are of tokens.
        expires_at: Unix time at which they expire unless they are used before; null while pinned.
        token_range: with `late_chunking`, the positions of the text among those of all.
        late_chunking: with `late_chunking_params`, the parts whose vectors are in `embedding`.
        pieces: with `split_long_inputs`, of a text beyond the model's limit, the characters of its
            pieces.
        approximate: with `pieces`, true if the dense vector is not that of all positions: the
            model's is not a mean of them.
        input_tokens: positions that were computed.
        truncated: a part of the input was cut off.
    """

    index: Annotated[int, example(0)]
    object: Literal["embedding"] = "embedding"
    embedding: Annotated[list[float | list[float]] | str | None, example([0.12, -0.07])] = None
    scale: Annotated[float | None, example(211.6)] = None
    sparse: SparseVector | None = None
    tokens: TokenVectors | None = None
    token_labels: list[TokenLabel] | None = None
    ref: Annotated[str | None, example("pv-...")] = None
    num_vectors: Annotated[int | None, example(177)] = None
    token_range: Annotated[tuple[int, int] | None, example([0, 12])] = None
    late_chunking: Chunking | None = None
    pieces: Annotated[list[tuple[int, int]] | None, example([[0, 2040], [2040, 3100]])] = None
    approximate: bool | None = None
    expires_at: Annotated[int | None, example(1764000000)] = None
    input_tokens: Annotated[int, example(4)]
    truncated: Annotated[bool, example(False)]


class EmbeddingResponse(TextsAnswer, frozen=True, kw_only=True):
    """The response of `/v1/embeddings`."""

    data: Annotated[list[EmbeddingData], field("the entries.")]
    usage: Annotated[TextsUsage, field("Positions and tokens of this answer.")]


class PoolingData(msgspec.Struct, frozen=True, kw_only=True):
    """Vector of one input, or of its tokens: numbers, or base64 of them."""

    index: ListIndex
    object: Literal["pooling"] = "pooling"
    data: Annotated[
        list[float | list[float]] | str,
        field("the vector: numbers, or base64 of them.", [0.12, -0.07]),
    ]
    shape: Annotated[
        list[int] | msgspec.UnsetType,
        field("of tokens: their number, and numbers of each.", [2, 3]),
    ] = msgspec.UNSET
    scale: Annotated[
        float | list[float] | msgspec.UnsetType,
        field("of int8, the factor of the vector, or of each token's.", 211.6),
    ] = msgspec.UNSET
    input_tokens: Annotated[int, field("positions that were computed.", 4)]
    truncated: Annotated[bool, field("a part of the input was cut off.", False)]


class PoolingResponse(TextsAnswer, frozen=True, kw_only=True):
    """The response of `/pooling`."""

    id: Annotated[str, field("id of this answer.", "pooling-5d0f")]
    data: Annotated[list[PoolingData], field("the entries.")]
    usage: Annotated[TextsUsage, field("Positions and tokens of this answer.")]


class ClassificationData(msgspec.Struct, frozen=True, kw_only=True):
    """Class probabilities of one input; `label` is the model's name of the likeliest class."""

    index: ListIndex
    label: Annotated[str | None, field("the model's name of the likeliest class.", "positive")]
    probs: Annotated[list[float], field("probability of each class.", [0.9, 0.1])]
    num_classes: Annotated[int, field("number of classes.", 2)]


class ClassificationResponse(TextsAnswer, frozen=True, kw_only=True):
    """The response of `/classify`."""

    id: Annotated[str, field("id of this answer.", "classify-5d0f")]
    data: Annotated[list[ClassificationData], field("the entries.")]
    usage: Annotated[TextsUsage, field("Positions and tokens of this answer.")]
