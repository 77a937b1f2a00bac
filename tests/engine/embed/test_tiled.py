"""Layers over a CPU's tiles give what torch's own layers give, on CPUs with tiles and without."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, BertModel

from inlay.base.errors import EngineError
from inlay.engine.embed import encoder as encoder_module
from inlay.engine.embed.attention import IMPLEMENTATION, PackedAttention
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.tiled import LayerSizes, Parts, TiledEncoder, library, tile
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.native import build, sources
from inlay.messages.prompt import Prompt, Tokens
from tests.embedding_models import sized_embedding
from tests.lifelike import lifelike

LENGTHS = (97, 64, 33, 32, 31, 17, 16, 2, 1)
WITHOUT_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8", "-mno-avx512bf16")
ERRORS: dict[Parts, float] = {1: 3e-2, 2: 3e-4, 3: 1e-5}


def config(**options: object) -> BertConfig:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
    }
    made = BertConfig(**{**sizes, "vocab_size": 50, "layer_norm_eps": 1e-5, **options})
    made._attn_implementation = IMPLEMENTATION
    return made


def bert(**options: object) -> BertModel:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = BertModel(config(**options), add_pooling_layer=False)
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def states(lengths: tuple[int, ...], size: int = 64) -> Tensor:
    return torch.randn(1, sum(lengths), size, generator=torch.Generator().manual_seed(7))


def run(layers: torch.nn.Module, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    found = layers(x.clone(), packed=PackedAttention(lengths, x.device))
    states: Tensor = found if isinstance(layers, TiledEncoder) else found.last_hidden_state
    return states[0]


@pytest.fixture(scope="module", params=["this CPU", "no tiles"])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The loops as they are compiled here, and as they are where a compiler knows no tiles."""
    if request.param == "this CPU":
        found = library()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            words = WITHOUT_TILES if "-mprefer-vector-width=512" in sources.FLAGS else ()
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


@pytest.mark.parametrize(
    ("parts", "threads"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 3)], indirect=["threads"]
)
def test_layers_over_tiles_give_what_torch_gives(
    loops: ctypes.CDLL, parts: Parts, threads: int
) -> None:
    model = bert()
    tiled = TiledEncoder(model.encoder, LayerSizes(64, 96, 2, 1e-5), parts, loops)
    for lengths in (LENGTHS, (5,), (3, 13, 16), (1, 30), (130,), (260, 258)):
        x = states(lengths)
        expected = run(model.encoder, x, lengths)
        error = (run(tiled, x, lengths) - expected).abs().max() / expected.abs().max()
        assert error < ERRORS[parts]


def test_heads_of_64_and_many_layers_are_the_same(loops: ctypes.CDLL) -> None:
    model = bert(hidden_size=128, intermediate_size=160, num_hidden_layers=4)
    tiled = TiledEncoder(model.encoder, LayerSizes(128, 160, 2, 1e-5), 3, loops)
    x = states((70, 9), 128)
    assert torch.allclose(run(tiled, x, (70, 9)), run(model.encoder, x, (70, 9)), atol=2e-5)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(25, 3), (slice(20, 31), slice(None))], ids=["one", "all"])
def test_a_sequence_that_is_not_finite_harms_no_neighbour(
    loops: ctypes.CDLL, parts: Parts, poison: float, place: tuple[int | slice, int | slice]
) -> None:
    tiled = TiledEncoder(bert().encoder, LayerSizes(64, 96, 2, 1e-5), parts, loops)
    x = states((20, 11, 7))
    clean = run(tiled, x, (20, 11, 7))
    x[0][place] = poison
    found = run(tiled, x, (20, 11, 7))
    assert torch.equal(found[:20], clean[:20])
    assert torch.equal(found[31:], clean[31:])
    # Attention brings it to every position of its sequence.
    assert found[20:31].isnan().all()


@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e-6, 1e6, 1e15])
def test_states_of_any_magnitude_are_as_exact(loops: ctypes.CDLL, scale: float) -> None:
    model, lengths = bert(), (1,) * 20 + (13,)
    x = states(lengths) * scale
    tiled = run(TiledEncoder(model.encoder, LayerSizes(64, 96, 2, 1e-5), 3, loops), x, lengths)
    plain = run(model.encoder, x, lengths)
    exact = run(model.double().encoder, x.double(), lengths)
    assert (tiled - exact).norm() < 2 * (plain - exact).norm()


def test_a_sequence_is_the_same_alone_and_among_others(loops: ctypes.CDLL) -> None:
    tiled = TiledEncoder(bert().encoder, LayerSizes(64, 96, 2, 1e-5), 3, loops)
    x = states((40, 23, 9))
    among = run(tiled, x, (40, 23, 9))
    assert torch.allclose(run(tiled, x[:, 40:63], (23,)), among[40:63], atol=1e-5)


def test_float32_in_three_digits_is_as_exact_as_a_float32_product(loops: ctypes.CDLL) -> None:
    model = bert()
    x = states((64, 50))
    tiled = run(TiledEncoder(model.encoder, LayerSizes(64, 96, 2, 1e-5), 3, loops), x, (64, 50))
    plain = run(model.encoder, x, (64, 50))
    exact = run(model.double().encoder, x.double(), (64, 50))
    assert (tiled - exact).abs().max() < 4 * (plain - exact).abs().max()


def test_digits_are_as_exact_beside_an_element_a_hundred_times_as_large(loops: ctypes.CDLL) -> None:
    model = bert()
    for norm in (model.encoder.layer[0].attention.output, model.encoder.layer[0].output):
        norm.LayerNorm.weight.data[3] *= 100
    x = states((64, 50))
    tiled = run(TiledEncoder(model.encoder, LayerSizes(64, 96, 2, 1e-5), 3, loops), x, (64, 50))
    plain = run(model.encoder, x, (64, 50))
    exact = run(model.double().encoder, x.double(), (64, 50))
    assert (tiled - exact).norm() < 8 * (plain - exact).norm()


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
    assert tile(model, 3) is None
    assert model.encoder is before


def test_an_encoder_that_is_not_what_it_seems_stays_as_it_is() -> None:
    model = bert()
    model.encoder.layer[1].attention.self.scaling = 1.0
    assert tile(model, 3) is None


def test_states_that_do_not_fit_their_lengths_are_refused() -> None:
    loops = library()
    assert loops is not None
    tiled = TiledEncoder(bert().encoder, LayerSizes(64, 96, 2, 1e-5), 1, loops)
    with pytest.raises(EngineError, match="9 positions were given for sequences of 12"):
        run(tiled, states((9,)), (7, 5))


@pytest.mark.parametrize(
    ("ids", "seconds"), [([1, 50], []), ([1, -1], []), ([1] * 41, []), ([1, 2], [1])]
)
def test_ids_places_and_types_without_embeddings_are_refused(
    ids: list[int], seconds: list[int]
) -> None:
    body = tile(bert(max_position_embeddings=40, type_vocab_size=1), 3)
    assert body is not None
    assert body([1, 49], [2]).isfinite().all()
    with pytest.raises(EngineError, match="embeddings of 50 ids, 40 places and 1 types"):
        body(ids, [len(ids)], seconds)


@pytest.mark.parametrize("task", ["embed", "score"])
@pytest.mark.parametrize(
    "asked", [{"dtype": "float32"}, {"float32_matmul_precision": "high"}, {"dtype": "bfloat16"}]
)
def test_a_model_served_over_tiles_gives_the_vectors_and_scores_it_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, asked: dict[str, object]
) -> None:
    kind = BertModel if task == "embed" else BertForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind(config()).save_pretrained(tmp_path)
    settings = EngineSettings.of(model=str(tmp_path), task=task, num_threads=1, **asked)
    prompts = [Prompt.of(Tokens(list(range(1, length)))) for length in (40, 31, 8)]
    seconds = [9, 7, 3] if task == "score" else []
    found = []
    for serve in (True, False):
        monkeypatch.setattr(encoder_module, "tiles_serve", lambda serve=serve: serve)
        loaded = Encoder.load(settings)
        assert isinstance(loaded._base.encoder, TiledEncoder) is serve
        found.append(loaded.vectors(prompts, seconds))
    tolerance = 5e-2 if asked.get("dtype") == "bfloat16" else 1e-3
    assert torch.allclose(found[0], found[1], atol=tolerance * float(found[1].abs().max()))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("place", ["out_bias", "up_bias", "down_bias", "norm_bias"])
def test_one_element_of_one_layer_that_differs_is_seen_behind_loud_channels(
    parts: Parts, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest state of trained models is many times a typical one, and so hides it."""
    directory = lifelike(
        sized_embedding("bert", hidden_size=64, num_attention_heads=2, intermediate_size=96)
    )
    dtype = torch.bfloat16 if parts == 1 else torch.float32

    def tiled() -> object:
        model = BertModel.from_pretrained(
            directory, dtype=dtype, attn_implementation=IMPLEMENTATION, add_pooling_layer=False
        )
        return tile(model.requires_grad_(False), parts)

    assert tiled() is not None
    usual = TiledEncoder._layer
    numbers = iter(range(2))

    def wrong(self: TiledEncoder, layer: torch.nn.Module, parts: Parts) -> object:
        found = usual(self, layer, parts)
        if next(numbers) == 1:
            address = getattr(found, place)
            (bias,) = (each for each in self._tensors if each.data_ptr() == address)
            bias[1] += 2
        return found

    monkeypatch.setattr(TiledEncoder, "_layer", wrong)
    assert tiled() is None
