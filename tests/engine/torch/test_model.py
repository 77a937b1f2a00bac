"""A loaded model agrees with transformers for any chunks, and refuses what it does not support."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.model import CausalModel
from inlay.engine.weights import weights_id
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.tensors.table import EmbeddingTable
from tests.models import EOS_ID, VOCAB_SIZE, make, tiny

PAGE = 16
NEW = 24
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Enough for what does not differ by family; `test_families` has all of them."""


def load(directory: Path, **options: Any) -> CausalModel:
    return CausalModel.load(
        EngineSettings.of(model=str(directory), device="cpu", num_threads=1, **options)
    )


def stale_pages(model: CausalModel) -> Pages:
    """Pages as another's poisoned request may have left them."""
    pages = model.new_pages(40 * len(model.page_groups), PAGE)
    for tensor in (*pages.keys, *pages.values):
        tensor.fill_(float("nan"))
    return pages


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def scattered(model: CausalModel, sequences: int, each: int = 10) -> list[list[PageRun]]:
    """For each sequence a run of pages in each page group."""
    groups = len(model.page_groups)
    order = (
        torch.randperm(sequences * groups * each, generator=torch.Generator().manual_seed(6)) + 1
    )
    return [
        [PageRun(pages.tolist()) for pages in own]
        for own in order.view(sequences, groups, each).unbind()
    ]


def greedy(
    model: CausalModel, prompts: list[Prompt], chunks: list[list[int]], new: int = NEW
) -> list[list[int]]:
    """Decode all prompts together.

    Step i computes chunks[i][j] positions of prompt j, later steps one each.
    """
    pages, owned = stale_pages(model), scattered(model, len(prompts))
    known = list(prompts)
    computed = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(new + len(chunks)):
        stretches, whose = [], []
        for index, prompt in enumerate(known):
            count = chunks[step][index] if step < len(chunks) else len(prompt) - computed[index]
            count = min(count, len(prompt) - computed[index])
            if count and len(outputs[index]) < new:
                start = computed[index]
                samples = start + count == len(prompt)
                parts = prompt.spans(start, start + count)
                stretches.append(BatchItem(parts, start, count, owned[index], samples))
                computed[index] += count
                if samples:
                    whose.append(index)
        if not stretches:
            break
        logits = model.forward(Batch.pack(stretches, PAGE), pages)
        assert logits.shape == (len(whose), model.vocab_size)
        assert logits.dtype == torch.float32
        for index, id_ in zip(whose, logits.argmax(-1).tolist(), strict=True):
            outputs[index].append(id_)
            known[index] = Prompt.of(*known[index].segments, Tokens([id_]))
    return outputs


def generated(
    directory: Path, prompt: list[int], dtype: torch.dtype = torch.float32
) -> tuple[list[int], Tensor]:
    """Greedy ids of plain transformers and the logits each was chosen from."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW,
        eos_token_id=None,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences[0, len(prompt) :].tolist(), torch.stack(found.logits)[:, 0].float()


def looked_up(directory: Path, ids: list[int], dtype: str = "float32") -> Rows:
    table = EmbeddingTable.open(directory).rows(ids, dtype)
    return Rows(Buffer(table.tobytes()), dtype, (len(ids), table.shape[1]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "chunks", [[], [[5, 16, 33], [0, 1, 16], [0, 24, 2]]], ids=["whole prompts", "chunked prompts"]
)
def test_greedy_output_in_float32_equals_transformers(family: str, chunks: list[list[int]]) -> None:
    prompts = prompts_of(5, 40, 77)
    found = greedy(load(tiny(family)), [Prompt.of(Tokens(ids)) for ids in prompts], chunks)
    assert found == [generated(tiny(family), ids)[0] for ids in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_rows_of_the_table_and_mixtures_are_the_same_prompt(family: str) -> None:
    (ids,) = prompts_of(45)
    mixed = Prompt.of(
        Tokens(ids[:7]),
        looked_up(tiny(family), ids[7:20]),
        Tokens(ids[20:21]),
        looked_up(tiny(family), ids[21:]),
    )
    model = load(tiny(family))
    prompts = [Prompt.of(Tokens(ids)), Prompt.of(looked_up(tiny(family), ids)), mixed]
    for prompt in prompts:
        stretch = BatchItem(prompt.spans(0, 45), 0, 45, scattered(model, 1, 3)[0], True)
        logits = model.forward(Batch.pack([stretch], PAGE), stale_pages(model))
        if prompt is prompts[0]:
            expected = logits
        assert torch.equal(logits, expected)
    together = greedy(model, prompts, [[10, 20, 16]])
    assert together[0] == together[1] == together[2] == generated(tiny(family), ids)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_leaves_transformers_only_where_two_tokens_are_nearly_equal(family: str) -> None:
    directory = tiny(family, "bfloat16")
    model = load(directory)
    assert model.dtype == torch.bfloat16
    for ids in prompts_of(5, 40, 77):
        expected, logits = generated(directory, ids, torch.bfloat16)
        found = greedy(model, [Prompt.of(Tokens(ids))], [])[0]
        split = next((at for at in range(NEW) if found[at] != expected[at]), None)
        if split is not None:
            best = logits[split].topk(2).values
            # Both leave float32 by about 1.5% of a logit's spread, rounding at different places.
            assert best[0] - best[1] < 0.12 * logits[split].std()


def test_neighbours_do_not_change_an_answer() -> None:
    model = load(tiny("qwen3"))
    (ids,) = prompts_of(30)
    alone = greedy(model, [Prompt.of(Tokens(ids))], [])[0]
    crowd = [Prompt.of(Tokens(other)) for other in prompts_of(3, 60, 17)]
    assert (
        greedy(model, [crowd[0], crowd[1], Prompt.of(Tokens(ids)), crowd[2]], [[1, 8, 7, 17]])[2]
        == alone
    )


def test_a_step_in_which_nothing_samples_gives_no_logits_and_fills_pages() -> None:
    model = load(tiny("llama"))
    pages = stale_pages(model)
    batch = Batch.pack([BatchItem([(0, Tokens([5, 6]))], 0, 2, [PageRun([1])], False)], PAGE)
    assert model.forward(batch, pages).shape == (0, VOCAB_SIZE)
    assert pages.keys[0][:, 1, :2].isfinite().all()
    assert pages.keys[0][:, 1, 2:].isnan().all()


def test_a_step_in_which_nothing_samples_does_not_read_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(tiny("llama"))
    monkeypatch.setattr(model, "_head", None)
    assert model.logits(torch.empty(0, model.hidden_size)).shape == (0, VOCAB_SIZE)


def test_logits_may_be_changed_in_place() -> None:
    model = load(tiny("llama"))
    batch = Batch.pack([BatchItem([(0, Tokens([5]))], 0, 1, [PageRun([1])], True)], PAGE)
    logits = model.forward(batch, stale_pages(model))
    logits[0, 3] = 7.0
    assert logits[0, 3] == 7.0


def test_rows_of_another_dtype_or_size_are_an_error() -> None:
    model = load(tiny("llama"))
    for rows in (looked_up(tiny("llama"), [4], "bfloat16"), looked_up(tiny("qwen2"), [4])):
        batch = Batch.pack([BatchItem([(0, rows)], 0, 1, [PageRun([1])], True)], PAGE)
        with pytest.raises(EngineError, match=r"the model takes torch\.float32 of 48"):
            model.forward(batch, stale_pages(model))


def test_a_model_knows_its_facts() -> None:
    model = load(tiny("qwen3"), max_model_len=128)
    assert (model.vocab_size, model.hidden_size, model.max_model_len) == (VOCAB_SIZE, 48, 128)
    assert model.eos_token_ids == (EOS_ID,)
    assert model.default_sampling == {}
    assert model.refuses_rows is None
    assert model.embedding_table_id == EmbeddingTable.open(tiny("qwen3")).id
    pages = model.new_pages(3, 32)
    nbytes = sum(tensor.nbytes for tensor in (*pages.keys, *pages.values))
    assert nbytes == (1 + 3) * model.page_bytes(32)


def test_a_model_knows_what_each_of_its_layers_keeps() -> None:
    assert load(tiny("llama")).layers == (LayerShape(None, 2, 8, 8),) * 2
    assert load(tiny("qwen3")).layers == (LayerShape(None, 2, 16, 16),) * 2
    assert load(tiny("mistral")).layers == (LayerShape(24, 2, 16, 16),) * 2


def test_default_sampling_is_what_a_sampling_generation_config_says(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny("qwen3"), directory)
    (directory / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2, 1]})
    )
    model = load(directory)
    assert model.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert model.eos_token_ids == (2, 1)


def test_sampling_defaults_may_be_the_apis_own_or_come_from_another_directory(
    tmp_path: Path,
) -> None:
    directory, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(tiny("qwen3"), directory)
    other.mkdir()
    said = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 1]}
    (directory / "generation_config.json").write_text(json.dumps(said))
    (other / "generation_config.json").write_text(json.dumps({**said, "temperature": 0.3}))
    for name, temperature in (("auto", 0.6), ("vllm", None), ("none", None), (str(other), 0.3)):
        model = load(directory, generation_config=name)
        assert model.default_sampling.get("temperature") == temperature
        assert model.eos_token_ids == (2, 1)
    with pytest.raises(InvalidRequestError, match=r"--generation-config gone: there is no gone/"):
        load(directory, generation_config="gone")


def changed(directory: Path, tmp_path: Path, **fields: Any) -> Path:
    copy = tmp_path / "changed"
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **fields}))
    return copy


def test_settings_a_model_cannot_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="maximum context length is 512"):
        load(tiny("llama"), max_model_len=1024)
    with pytest.raises(InvalidRequestError, match="float16 does not run on a CPU"):
        load(tiny("llama"), dtype="float16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequestError, match="device cuda"):
        CausalModel.load(EngineSettings.of(model=str(tiny("llama")), device="cuda"))


def test_a_float16_checkpoint_runs_in_float32_on_a_cpu_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(make("llama", tmp_path, dtype="float16")).dtype == torch.float32
    assert "float32" in caplog.text


def test_missing_weights_are_an_error_and_not_random_numbers(tmp_path: Path) -> None:
    directory = make("llama", tmp_path)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequestError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        load(directory)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    directory = make("llama", tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InvalidRequestError, match="safetensors"):
        load(directory)


def test_what_is_neither_a_directory_nor_a_hub_model_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no/such-model", "not a name at all"):
        with pytest.raises(InvalidRequestError, match="not a directory"):
            load(Path(name))


def test_a_weights_id_names_content_and_not_files(tmp_path: Path) -> None:
    sharded = make("llama", tmp_path / "sharded", shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert weights_id(sharded) == weights_id(tiny("llama"))
    assert (
        greedy(load(sharded), [Prompt.of(Tokens([5, 6, 7]))], [])[0]
        == generated(tiny("llama"), [5, 6, 7])[0]
    )

    other = tmp_path / "other"
    shutil.copytree(tiny("llama"), other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    theta = changed(tiny("llama"), tmp_path, rms_norm_eps=1e-4)
    assert len({weights_id(tiny("llama")), weights_id(other), weights_id(theta)}) == 3


def test_threads_leave_a_core_to_the_others_unless_told() -> None:
    assert threads.count(3) == 3
    assert threads.count(None) >= 1
    assert threads.environment({})["GOMP_SPINCOUNT"] == "1000"
    mine = {"GOMP_SPINCOUNT": "5", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    assert threads.environment(mine) == {
        "GOMP_SPINCOUNT": "5",
        "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.hugetlb=1",
    }
