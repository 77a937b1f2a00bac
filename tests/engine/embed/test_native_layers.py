"""Layers in one native call give what torch's own give, on CPUs with tiles or AVX-512 and without."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedConfig,
    RobertaConfig,
)

from inlay.base.errors import EngineError
from inlay.engine.embed import encoder as encoder_module
from inlay.engine.embed.attention import IMPLEMENTATION, PackedAttention
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.native_layers import (
    LayerSizes,
    NativeEncoder,
    Parts,
    fastest,
    library,
    native_body,
)
from inlay.engine.embed.relative_bias import bias_scores
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.native import build, sources
from inlay.messages.prompt import Prompt, Tokens
from tests.embedding_models import sized_embedding
from tests.lifelike import lifelike

SIZES = LayerSizes(64, 96, 2, 1e-5)
LENGTHS = (97, 64, 33, 32, 31, 17, 16, 2, 1)
WITHOUT_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8", "-mno-avx512bf16")
WITHOUT = {"no tiles": WITHOUT_TILES, "no AVX-512": (*WITHOUT_TILES, "-mno-avx512f")}
ERRORS: dict[Parts, float] = {0: 1e-5, 1: 3e-2, 2: 3e-4, 3: 1e-5}


def config(kind: type[PreTrainedConfig], **options: object) -> PreTrainedConfig:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
    }
    if kind is not BertConfig:
        sizes["pad_token_id"] = 1
    if kind is RobertaConfig:
        sizes["type_vocab_size"] = 1
    made = kind(**{**sizes, "vocab_size": 50, "layer_norm_eps": 1e-5, **options})
    made._attn_implementation = IMPLEMENTATION
    return made


def bert(**options: object) -> BertModel:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = BertModel(config(BertConfig, **options), add_pooling_layer=False)
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def states(lengths: tuple[int, ...], size: int = 64) -> Tensor:
    return torch.randn(1, sum(lengths), size, generator=torch.Generator().manual_seed(7))


def run(layers: torch.nn.Module, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    found = layers(x.clone(), packed=PackedAttention(lengths, x.device))
    states: Tensor = found if isinstance(layers, NativeEncoder) else found.last_hidden_state
    return states[0]


@pytest.fixture(scope="module", params=["this CPU", *WITHOUT])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The loops as they are compiled here, and as they are where a compiler knows less."""
    if request.param == "this CPU":
        found = library()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            x86 = "-mprefer-vector-width=512" in sources.FLAGS
            words = WITHOUT[request.param] if x86 else ()
            patch.setattr(sources, "FLAGS", (*sources.FLAGS, *words))
            found = build.load("encoder")
    assert found is not None
    return found


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parts", "threads"),
    [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (0, 3), (1, 2), (2, 2), (3, 3)],
    indirect=["threads"],
)
def test_layers_in_one_call_give_what_torch_gives(
    loops: ctypes.CDLL, parts: Parts, threads: int
) -> None:
    model = bert()
    native = NativeEncoder(model.encoder, SIZES, parts, loops)
    for lengths in (LENGTHS, (5,), (3, 13, 16), (1, 30), (130,), (260, 258)):
        x = states(lengths)
        expected = run(model.encoder, x, lengths)
        error = (run(native, x, lengths) - expected).abs().max() / expected.abs().max()
        assert error < ERRORS[parts]


@pytest.mark.parametrize("parts", [0, 3])
def test_heads_of_64_and_many_layers_are_the_same(loops: ctypes.CDLL, parts: Parts) -> None:
    model = bert(hidden_size=128, intermediate_size=160, num_hidden_layers=4)
    native = NativeEncoder(model.encoder, LayerSizes(128, 160, 2, 1e-5), parts, loops)
    x = states((70, 9), 128)
    assert torch.allclose(run(native, x, (70, 9)), run(model.encoder, x, (70, 9)), atol=2e-5)


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(25, 3), (slice(20, 31), slice(None))], ids=["one", "all"])
def test_a_sequence_that_is_not_finite_harms_no_neighbour(
    loops: ctypes.CDLL, parts: Parts, poison: float, place: tuple[int | slice, int | slice]
) -> None:
    native = NativeEncoder(bert().encoder, SIZES, parts, loops)
    x = states((20, 11, 7))
    clean = run(native, x, (20, 11, 7))
    x[0][place] = poison
    found = run(native, x, (20, 11, 7))
    assert torch.equal(found[:20], clean[:20])
    assert torch.equal(found[31:], clean[31:])
    # Attention brings it to every position of its sequence.
    assert found[20:31].isnan().all()


@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e-6, 1e6, 1e15])
def test_states_of_any_magnitude_are_as_exact(
    loops: ctypes.CDLL, parts: Parts, scale: float
) -> None:
    model, lengths = bert(), (1,) * 20 + (13,)
    x = states(lengths) * scale
    native = run(NativeEncoder(model.encoder, SIZES, parts, loops), x, lengths)
    plain = run(model.encoder, x, lengths)
    exact = run(model.double().encoder, x.double(), lengths)
    assert (native - exact).norm() < 2 * (plain - exact).norm()


def test_a_sequence_in_float32_has_the_same_bits_alone_and_among_others(loops: ctypes.CDLL) -> None:
    native = NativeEncoder(bert().encoder, SIZES, 0, loops)
    x = states(LENGTHS)
    parts = zip(torch.split(x, list(LENGTHS), 1), LENGTHS, strict=True)
    assert torch.equal(
        torch.cat([run(native, own, (length,)) for own, length in parts]), run(native, x, LENGTHS)
    )


def test_a_sequence_is_the_same_alone_and_among_others(loops: ctypes.CDLL) -> None:
    native = NativeEncoder(bert().encoder, SIZES, 3, loops)
    x = states((40, 23, 9))
    among = run(native, x, (40, 23, 9))
    assert torch.allclose(run(native, x[:, 40:63], (23,)), among[40:63], atol=1e-5)


def test_float32_in_three_digits_is_as_exact_as_a_float32_product(loops: ctypes.CDLL) -> None:
    model = bert()
    x = states((64, 50))
    native = run(NativeEncoder(model.encoder, SIZES, 3, loops), x, (64, 50))
    plain = run(model.encoder, x, (64, 50))
    exact = run(model.double().encoder, x.double(), (64, 50))
    assert (native - exact).abs().max() < 4 * (plain - exact).abs().max()


def test_digits_are_as_exact_beside_an_element_a_hundred_times_as_large(loops: ctypes.CDLL) -> None:
    model = bert()
    for norm in (model.encoder.layer[0].attention.output, model.encoder.layer[0].output):
        norm.LayerNorm.weight.data[3] *= 100
    x = states((64, 50))
    native = run(NativeEncoder(model.encoder, SIZES, 3, loops), x, (64, 50))
    plain = run(model.encoder, x, (64, 50))
    exact = run(model.double().encoder, x.double(), (64, 50))
    assert (native - exact).norm() < 8 * (plain - exact).norm()


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_act": "relu"},
        {"num_attention_heads": 4},
        {"intermediate_size": 100},
        {"intermediate_size": 43_680, "num_hidden_layers": 1},
    ],
    ids=["another activation", "heads of 16", "an odd size", "more than sums hold"],
)
def test_what_the_loops_do_not_compute_stays_as_it_is(options: dict[str, object]) -> None:
    model = bert(**options)
    before = model.encoder
    assert native_body(model, 3) is None
    assert model.encoder is before


def test_an_encoder_that_is_not_what_it_seems_stays_as_it_is() -> None:
    model = bert()
    model.encoder.layer[1].attention.self.scaling = 1.0
    assert native_body(model, 3) is None


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
def test_scores_have_the_bias_of_each_distance(loops: ctypes.CDLL, parts: Parts) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = MPNetModel(config(MPNetConfig), add_pooling_layer=False)
        model.eval().requires_grad_(False)
        model.encoder.relative_attention_bias.weight.data.normal_(0, 3)
    # Far enough for the distances that share a bias.
    longest = 170
    whole = model.encoder.compute_position_bias(torch.empty(1, longest, 1))[0]
    with torch.inference_mode():
        bias = bias_scores(model)
        assert torch.equal(bias.of(longest), whole)
        native = NativeEncoder(
            model.encoder, SIZES, parts, loops, distances=bias.by_distance(longest)
        )
        for lengths in ((longest,), (97, 64, 31, 1)):
            x = states(lengths)
            packed = PackedAttention(lengths, x.device)
            bias.packed = packed
            expected = model.encoder(x)[0][0]
            error = (native(x.clone(), packed)[0] - expected).abs().max() / expected.abs().max()
            assert error < ERRORS[parts]
    with pytest.raises(EngineError, match="171 positions were given to layers that see 170"):
        run(native, states((171,)), (171,))


def tiles_permitted() -> bool:
    """Whether the kernel lets this process use AMX, which a CPU may have all the same."""
    # arch_prctl(ARCH_REQ_XCOMP_PERM)
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)


def test_a_cpu_is_served_by_what_it_has() -> None:
    features = sources.cpu_features()
    tiles, wide = "amx_int8" in features, "avx512f" in features
    if tiles and not tiles_permitted():
        tiles = wide = False  # what was compiled for this CPU cannot be used
    assert fastest(torch.float16, exact=True) is None
    assert fastest(torch.float32, exact=True) == (3 if tiles else 0 if wide else None)
    assert fastest(torch.float32, exact=False) == (2 if tiles else 0 if wide else None)
    assert fastest(torch.bfloat16, exact=True) == (1 if tiles else None)


def test_states_that_do_not_fit_their_lengths_are_refused() -> None:
    loops = library()
    assert loops is not None
    native = NativeEncoder(bert().encoder, SIZES, 1, loops)
    with pytest.raises(EngineError, match="9 positions were given for sequences of 12"):
        run(native, states((9,)), (7, 5))


@pytest.mark.parametrize(
    ("ids", "seconds"), [([1, 50], []), ([1, -1], []), ([1] * 41, []), ([1, 2], [1])]
)
def test_ids_places_and_types_without_embeddings_are_refused(
    ids: list[int], seconds: list[int]
) -> None:
    body = native_body(bert(max_position_embeddings=40, type_vocab_size=1), 3)
    assert body is not None
    assert body([1, 49], [2]).isfinite().all()
    with pytest.raises(EngineError, match="embeddings of 50 ids, 40 places and 1 types"):
        body(ids, [len(ids)], seconds)


@pytest.mark.parametrize("task", ["embed", "score"])
@pytest.mark.parametrize(
    ("parts", "asked"),
    [
        (0, {"dtype": "float32"}),
        (3, {"dtype": "float32"}),
        (2, {"float32_matmul_precision": "high"}),
        (1, {"dtype": "bfloat16"}),
    ],
)
@pytest.mark.parametrize("kind", [BertConfig, RobertaConfig, MPNetConfig])
def test_a_model_served_by_native_layers_gives_the_vectors_and_scores_it_gave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[PreTrainedConfig],
    task: str,
    parts: Parts,
    asked: dict[str, object],
) -> None:
    auto = AutoModel if task == "embed" else AutoModelForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = auto.from_config(config(kind))
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
    settings = EngineSettings.of(model=str(tmp_path), task=task, num_threads=1, **asked)
    prompts = [Prompt.of(Tokens(list(range(1, length)))) for length in (40, 31, 8)]
    seconds = [9, 7, 3] if task == "score" else []
    found = []
    for serve in (parts, None):
        monkeypatch.setattr(encoder_module, "fastest", lambda *_, serve=serve, **__: serve)
        loaded = Encoder.load(settings)
        assert isinstance(loaded._base.encoder, NativeEncoder) is (serve is not None)
        found.append(loaded.vectors(prompts, seconds))
    tolerance = 5e-2 if asked.get("dtype") == "bfloat16" else 1e-3
    assert torch.allclose(found[0], found[1], atol=tolerance * float(found[1].abs().max()))


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
@pytest.mark.parametrize("place", ["out_bias", "up_bias", "down_bias", "norm_bias"])
def test_one_element_of_one_layer_that_differs_is_seen_behind_loud_channels(
    parts: Parts, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest state of trained models is many times a typical one, and so hides it."""
    directory = lifelike(
        sized_embedding("bert", hidden_size=64, num_attention_heads=2, intermediate_size=96)
    )
    dtype = torch.bfloat16 if parts == 1 else torch.float32

    def native() -> object:
        model = BertModel.from_pretrained(
            directory, dtype=dtype, attn_implementation=IMPLEMENTATION, add_pooling_layer=False
        )
        return native_body(model.requires_grad_(False), parts)

    assert native() is not None
    usual = NativeEncoder._layer
    numbers = iter(range(2))

    def wrong(self: NativeEncoder, layer: torch.nn.Module, parts: Parts) -> object:
        found = usual(self, layer, parts)
        if next(numbers) == 1:
            address = getattr(found, place)
            (bias,) = (each for each in self._tensors if each.data_ptr() == address)
            bias[1] += 2
        return found

    monkeypatch.setattr(NativeEncoder, "_layer", wrong)
    assert native() is None
