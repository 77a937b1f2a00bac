"""What watches a server: metrics under vLLM's names, logs that are all JSON, spans by convention."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

import inlay
from inlay.base.build import build_id
from tests.models import tiny
from tests.parts import running
from tests.serving import free_port
from tests.telemetry.collector import collecting
from tests.telemetry.vllm_dashboards import series

pytestmark = pytest.mark.slow

VLLM = """
    num_requests_running num_requests_waiting num_requests_waiting_by_reason
    num_requests_kv_fetch_by_stage engine_sleep_state kv_cache_usage_perc corrupted_requests
    watermark_requests prefix_cache_queries prefix_cache_hits external_prefix_cache_queries
    external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions prompt_tokens
    prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens
    request_success admission_rejections request_prompt_tokens request_generation_tokens
    iteration_tokens_total request_max_num_generation_tokens request_params_n
    request_params_max_tokens time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_num_preemptions request_prefill_kv_computed_tokens kv_block_lifetime_seconds
    kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds lora_requests_info
""".split()  # noqa: SIM905 (as a list, a line for each)
"""Names of vLLM 0.33, from its `vllm/v1/metrics/loggers.py`."""

WITHOUT = {
    # Nothing here counts them, or the meaning does not exist.
    "num_requests_waiting_by_reason", "num_requests_kv_fetch_by_stage", "corrupted_requests",
    "watermark_requests", "external_prefix_cache_queries", "external_prefix_cache_hits",
    "prompt_tokens_cached_by_source", "admission_rejections", "request_num_preemptions",
    "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds", "lora_requests_info",
}  # fmt: skip


def test_metrics_have_vllms_names_and_those_of_its_published_dashboards() -> None:
    port = free_port()
    # One at a time: the second choice is queued.
    words = (tiny("llama"), "--served-model-name", "m", "--port", port, "--max-num-seqs", 1)
    with running("serve", *words, until="serving "):
        url = f"http://127.0.0.1:{port}"
        body = {"model": "m", "prompt": "the harbour", "max_tokens": 5, "ignore_eos": True, "n": 2}
        httpx.post(url + "/v1/completions", json=body, timeout=120).raise_for_status()
        text = httpx.get(url + "/metrics", timeout=60).text
    families = set(re.findall(r"^# TYPE vllm:(\w+) ", text, re.MULTILINE))
    names = {name.removesuffix("_total") for name in families} | families
    assert set(VLLM) - names == WITHOUT
    there = set(re.findall(r'^vllm:(\w+)\{[^}]*model_name="m"', text, re.MULTILINE))
    assert len(series()) > 20
    assert series() - there == set()
    for sample in (
        'vllm:request_params_n_sum{model_name="m"} 2.0',
        'vllm:request_params_max_tokens_sum{model_name="m"} 5.0',
        'vllm:request_max_num_generation_tokens_sum{model_name="m"} 5.0',
        f'inlay:build_info{{build="{build_id()}",version="{inlay.__version__}"}} 1.0',
    ):
        assert sample in text, text
    assert re.search(r"^process_resident_memory_bytes \d", text, re.MULTILINE)
    assert re.search(r"^process_open_fds \d", text, re.MULTILINE)


def lines_of(*words: object, **variables: str) -> list[dict[str, object]]:
    """Each line of what a command that ends with an error writes, as an object."""
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", *map(str, words)],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("command", ["worker", "frontend", "serve"])
def test_every_line_from_start_to_end_is_json_with_a_level(command: str, tmp_path: Path) -> None:
    nats = ("--nats", "nats://127.0.0.1:1", "--nats-wait", 0)
    words = {
        "worker": ("worker", tiny("llama"), "--engine", "echo", *nats),
        "frontend": ("frontend", *nats),
        "serve": ("serve", tmp_path / "none"),
    }[command]
    *_, last = lines_of(*words, "--log-format", "json")
    assert last["level"] == "ERROR"
    assert str(last["message"]).startswith(f"inlay {command}: ")
    # Settings that cannot be read say nothing of the form: the variable does.
    (only,) = lines_of(*words, "--no-such-flag", INLAY_LOG_FORMAT="json")
    assert (only["level"], "--no-such-flag" in str(only["message"])) == ("ERROR", True)


def test_a_server_writes_json_alone_and_its_spans_follow_the_conventions() -> None:
    port = free_port()
    with collecting() as collector:
        words = ("--served-model-name", "m", "--port", port, "--log-format", "json")
        more = ("--otlp-traces-endpoint", collector.url)
        with running("serve", tiny("llama"), *words, *more, until="serving ") as part:
            url = f"http://127.0.0.1:{port}"
            body = {"model": "m", "prompt": "the harbour", "max_tokens": 2}
            for changes, status in (({}, 200), ({"max_tokens": -1}, 400), ({"model": "no"}, 404)):
                answer = httpx.post(url + "/v1/completions", json=body | changes, timeout=120)
                assert answer.status_code == status
        spans = [span for _, span in collector.spans()]
    for line in part.said:
        assert json.loads(line)["level"] in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    served = [span for span in spans if span.name == "POST /v1/completions"]
    assert len(served) == 3
    for span in spans:
        values = {each.key: each.value for each in span.attributes}
        assert {key for key in values if key.startswith("gen_ai.")} <= known
        if span in served:
            assert values["gen_ai.operation.name"].string_value in operations
            assert values["gen_ai.provider.name"].string_value == "inlay"
            # Errors of clients leave the status of a server's span unset.
            assert span.status.code == 0
            failed = values["http.response.status_code"].int_value >= 400
            assert failed == ("error.type" in values)
            if not failed:
                assert values["gen_ai.response.model"].string_value == "m"
