"""`inlay bench`: its figures, against a server whose every write is known and against inlay's own."""

import asyncio
import base64
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.cli import main
from inlay.cli.command import UsageError
from inlay.media.image import read_image_header
from inlay_tools.bench.load import LoadSender, LoadShape, SentRequest
from inlay_tools.bench.metrics import BOUNDABLE, BenchFigures, Round, bounds_of
from inlay_tools.bench.workload import Body
from inlay_tools.http_client import HttpClient, RemoteServer
from tests.commands import run
from tests.live import Fleet

pytestmark = pytest.mark.extensions("tools")

BODY = Body("/chat/completions", b"{}")


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


@dataclass
class Recorder:
    """A server that streams three pieces of an answer, and notes when it did what."""

    received: list[float] = field(default_factory=list)
    wrote: list[list[float]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    cut: bool = False
    ended: list["asyncio.Task[None]"] = field(default_factory=list)

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended.append(asyncio.create_task(self.answer(reader, writer)))

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await self._head(reader):
            length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
            await reader.readexactly(length)
            self.received.append(time.perf_counter())
            self.running += 1
            self.most = max(self.most, self.running)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            self._chunk(writer, event(choices=[{"index": 0, "delta": {"role": "assistant"}}]))
            times = []
            for word in ("a", "b", "c"):
                await asyncio.sleep(0.02)
                times.append(time.perf_counter())
                self._chunk(writer, event(choices=[{"index": 0, "delta": {"content": word}}]))
            self.wrote.append(times)
            if self.cut:
                writer.close()
                return
            self._chunk(
                writer,
                event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})
                + b"data: [DONE]\n\n",
            )
            # Before the answer ends: the client may send the next one at once.
            self.running -= 1
            writer.write(b"0\r\n\r\n")
        writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def sent_to(recorder: Recorder, count: int, load: LoadShape) -> list[SentRequest]:
    server = await asyncio.start_server(recorder, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(RemoteServer.of(f"http://127.0.0.1:{port}/v1"))
    try:
        return await LoadSender(client, load).send([BODY] * count, np.random.default_rng(0))
    finally:
        await client.close()
        server.close()
        await asyncio.gather(*recorder.ended)


async def test_times_lie_between_what_the_server_did_and_what_followed() -> None:
    recorder = Recorder()
    (sent,) = await sent_to(recorder, 1, LoadShape())
    after = time.perf_counter()
    assert sent.error is None
    assert sent.due <= sent.started <= recorder.received[0]
    assert all(came >= wrote for came, wrote in zip(sent.came, recorder.wrote[0], strict=True))
    assert sent.came == sorted(sent.came)
    assert sent.came[-1] <= sent.ended <= after
    # The role before the answer is no token.
    assert sent.ttft >= recorder.wrote[0][0] - recorder.received[0]
    assert sent.ttft + sum(sent.itl) == pytest.approx(sent.latency)
    assert sent.tpot == pytest.approx((sent.latency - sent.ttft) / 4)
    assert (sent.input_tokens, sent.output_tokens) == (7, 5)


async def test_no_more_requests_run_than_are_allowed_and_connections_are_used_again() -> None:
    recorder = Recorder()
    sent = await sent_to(recorder, 12, LoadShape(max_concurrency=3))
    assert [each.error for each in sent] == [None] * 12
    assert recorder.most == len(recorder.ended) == 3


async def test_an_answer_that_is_cut_or_late_has_failed() -> None:
    (sent,) = await sent_to(Recorder(cut=True), 1, LoadShape())
    assert sent.error is not None
    assert "lost" in sent.error
    (sent,) = await sent_to(Recorder(), 1, LoadShape(request_timeout=0.001))
    assert sent.error == "no end within 0.001 s"


@given(
    count=st.integers(1, 200),
    rate=st.floats(0.1, 1e4),
    burstiness=st.floats(0.05, 20),
    seed=st.integers(0, 1 << 32),
)
def test_arrivals_keep_the_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    load = LoadShape(rate, burstiness)
    times = load.arrivals(count, np.random.default_rng(seed))
    assert times == load.arrivals(count, np.random.default_rng(seed))
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)


def test_arrivals_are_a_poisson_process_unless_bursts_are_wanted() -> None:
    def variation(burstiness: float) -> float:
        times = LoadShape(10.0, burstiness).arrivals(20_000, np.random.default_rng(1))
        gaps = np.diff(times)
        return float(gaps.std() / gaps.mean())

    assert variation(1.0) == pytest.approx(1.0, abs=0.05)
    assert variation(0.25) == pytest.approx(2.0, abs=0.2)
    assert variation(100.0) == pytest.approx(0.1, abs=0.02)
    assert LoadShape().arrivals(3, np.random.default_rng(0)) == [0.0] * 3


def made(started: float, came: list[float], tokens: int, error: str | None = None) -> SentRequest:
    return SentRequest(0.0, started, came, came[-1], 10, tokens, error)


def test_figures_are_those_of_their_definitions() -> None:
    metrics = BenchFigures(
        [
            Round([made(0.0, [0.1, 0.2, 0.4], 4), made(1.0, [1.3, 1.5], 2)]),
            Round([made(0.0, [0.5], 1), made(0.0, [9.0], 9, error="lost")]),
        ],
        {"ttft": 0.35, "e2el": 0.45},
        [50.0, 99.0],
    )
    totals = metrics.totals()
    assert totals["completed"] == 3
    assert totals["failed"] == 1
    assert metrics.errors == {"lost": 1}
    assert totals["duration"] == pytest.approx(1.5 + 0.5)
    assert totals["request_throughput"] == pytest.approx(3 / 2)
    assert totals["request_goodput"] == pytest.approx(1 / 2)
    assert totals["output_throughput"] == pytest.approx(7 / 2)
    assert totals["total_token_throughput"] == pytest.approx(37 / 2)
    assert totals["max_concurrent_requests"] == 1
    # In the first round's second 0: four tokens; those of the other request came in second 1.
    assert totals["max_output_tokens_per_s"] == pytest.approx(4)
    assert metrics.seconds("ttft") == pytest.approx([0.1, 0.3, 0.5])
    assert metrics.seconds("tpot") == pytest.approx([0.1, 0.2])
    assert metrics.seconds("itl") == pytest.approx([0.1, 0.2, 0.2])
    assert metrics.seconds("e2el") == pytest.approx([0.4, 0.5, 0.5])
    times = metrics.times()
    assert times["mean_ttft_ms"] == pytest.approx(300)
    assert times["median_ttft_ms"] == times["p50_ttft_ms"] == pytest.approx(300)
    assert times["p99_ttft_ms"] == pytest.approx(np.percentile([100, 300, 500], 99))
    assert times["std_itl_ms"] == pytest.approx(np.std([100, 200, 200]))


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", "ttft:inf"])
def test_a_bound_of_goodput_that_makes_no_sense_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--goodput takes ttft, tpot, e2el"):
        bounds_of([word], BOUNDABLE, "--goodput")


def bench(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, object]:
    assert main(["bench", *words, "-o", "json"], {}) == status
    out: dict[str, object] = json.loads(capsys.readouterr().out)
    return out


SMALL = ("--num-prompts", "6", "--input-len", "24", "--output-len", "5")


def server_side(url: str, name: str) -> float:
    text = httpx.get(url + "/metrics").text
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([\d.e+-]+)$", text, re.M)
    return sum(map(float, found))


def test_figures_agree_with_those_of_the_server(
    echo_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's times lie within the client's, whatever else the machine does."""
    names = ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds")
    before = [server_side(echo_url, f"{name}_sum") for name in names]
    count = server_side(echo_url, f"{names[0]}_count")
    tokens = server_side(echo_url, "vllm:generation_tokens_total")
    words = ["--url", echo_url + "/v1", *SMALL, "--num-warmups", "0", "--max-concurrency", "2"]
    found = bench(capsys, *words)
    assert found["completed"] == found["num_prompts"] == 6
    assert re.fullmatch(r"\d{8}-\d{6}", str(found["date"]))
    assert found["total_output_tokens"] == 6 * 5
    assert 1 <= int(str(found["max_concurrent_requests"])) <= 2
    assert server_side(echo_url, f"{names[0]}_count") - count == 6
    assert server_side(echo_url, "vllm:generation_tokens_total") - tokens == 6 * 5
    for name, was, key in zip(names, before, ("mean_ttft_ms", "mean_e2el_ms"), strict=True):
        inside = (server_side(echo_url, f"{name}_sum") - was) / 6 * 1000
        assert 0 < inside <= float(str(found[key]))


@pytest.mark.parametrize("prompts", ["text", "embeds", "refs"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_prompts_of_each_kind_are_taken_and_have_the_wanted_length(
    url: str, prompts: str, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompts", prompts, "--endpoint", endpoint, "--prefix-len", "16"]
    found = bench(capsys, "--url", url + "/v1", *SMALL, *words)
    assert (found["completed"], found["failed"]) == (6, 0)
    tokens = int(str(found["total_input_tokens"]))
    if endpoint == "completions" and prompts != "text":
        assert tokens == 6 * 24
    else:
        # Template and special tokens; text is cut where tokens end.
        assert tokens >= 6 * 20


def test_two_servers_are_compared_in_one_run(
    url: str, echo_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--url", url + "/v1", echo_url + "/v1", *SMALL, "--rounds", "2"]
    assert main([*words, "--request-rate", "500", "--goodput", "ttft:60000"], {}) == 0
    out = capsys.readouterr().out
    assert out.count(" Serving Benchmark Result ") == 2
    assert out.count("Successful requests:                     12 ") == 2
    assert re.search(r"^Mean TTFT \(ms\) +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ to [\d.]+$", out, re.M)
    found = bench(capsys, *words[1:])
    servers = found["servers"]
    assert isinstance(servers, list)
    compared = found["compared"]
    assert isinstance(compared, dict)
    ratio = compared["mean_ttft_ms"]["ratio"]
    assert ratio == pytest.approx(servers[1]["mean_ttft_ms"] / servers[0]["mean_ttft_ms"])


def test_the_report_fits_a_narrow_terminal(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["bench", "--url", url + "/v1", *SMALL], {}) == 0
    out = capsys.readouterr().out
    assert "Mean TTFT (ms):\n  " in out
    assert out.endswith("=" * 20 + "\n")


def test_written_bodies_are_sent_again_as_they_are(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bodies.jsonl"
    for prompts in ("text", "embeds"):
        words = ["--url", url + "/v1", *SMALL, "--prompts", prompts]
        assert main(["bench", "write", *words, "--output", str(path), "--no-stream"], {}) == 0
        lines = path.read_text().splitlines()
        assert len(set(lines)) == 6
        assert all("stream" not in json.loads(line) for line in lines)
        answers = [
            httpx.post(url + "/v1/completions", json=json.loads(line)).raise_for_status().json()
            for line in lines
        ]
        again = tmp_path / "again.jsonl"
        capsys.readouterr()
        more = ["--output", str(again), "--no-stream", "-o", "json"]
        assert main(["bench", "write", *words, *more], {}) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {"file": str(again), "requests": 6, "bytes": again.stat().st_size}
        assert again.read_bytes() == path.read_bytes()
        found = bench(capsys, "--url", url + "/v1", "--bodies", str(path))
        assert found["completed"] == 6
        counted = sum(answer["usage"]["prompt_tokens"] for answer in answers)
        assert found["total_input_tokens"] == counted


def test_pictures_are_asked_about_in_chats(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompts", "images", "--image-size", "30", *SMALL]
    assert main(["bench", "write", "--url", url + "/v1", *words], {}) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 6
    pictures = set()
    for line in lines:
        picture, question = line["messages"][0]["content"]
        data = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
        header = read_image_header(data)
        assert (header.format, header.height, header.width) == ("PNG", 30, 30)
        assert question["type"] == "text"
        pictures.add(data)
    assert len(pictures) == 6


def test_a_failed_request_is_counted_and_told(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bodies.jsonl"
    good = {"model": "tiny", "prompt": "the harbour", "max_tokens": 2, "ignore_eos": True}
    bad = good | {"temperature": -1}
    path.write_text("\n".join(map(json.dumps, (good, bad, good))))
    found = bench(capsys, "--url", url + "/v1", "--bodies", str(path), status=1)
    assert (found["completed"], found["failed"]) == (2, 1)
    path.write_text(json.dumps(bad))
    assert main(["bench", "--url", url + "/v1", "--bodies", str(path)], {}) == 1
    captured = capsys.readouterr()
    assert "answered no request" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--url", "http://127.0.0.1:9/v1"], "cannot be reached", 1),
        (["--url", "a", "b", "c"], "--url takes one server, or two to compare, got 3", 2),
        (["--metric-percentiles", "100"], "more than 0 and less than 100", 2),
        (["--goodput", "itl:3"], "--goodput takes ttft, tpot, e2el", 2),
        (["--bodies", "nowhere"], "nowhere: No such file", 2),
        (["--request-rate", "0"], "--request-rate: must be more than 0", 2),
    ],
)
def test_words_that_make_no_sense_are_one_line(
    words: list[str], said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words], {}) == status
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prefix-len", "200"], "--prefix-len is part of --input-len"),
        (["--prompts", "images", "--endpoint", "completions"], "asked about in chats"),
        (["--input-len", "9000000"], "are more than the"),
        (
            ["--prompts", "embeds", "--num-prompts", "1000000", "--input-len", "400"],
            "bytes that are held ready",
        ),
    ],
)
def test_requests_that_cannot_be_made_are_refused_before_any_is_sent(
    url: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", url + "/v1", *words], {}) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"model": "m"}', '{"messages": 3, "model": 4}'])
def test_a_line_that_is_no_body_is_named(
    line: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bodies.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    assert main(["bench", "--url", url + "/v1", "--bodies", str(path)], {}) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_server_that_is_not_inlays_is_measured_by_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says no hidden size, so rows cannot be made; it has no tokenizer route either."""

    async def others(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            await reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
            status, body = "404 Not Found", b'{"detail": "Not Found"}'
            if b"GET /v1/models " in head:
                status, body = "200 OK", b'{"data": [{"id": "other"}]}'
            elif b"POST /v1/completions " in head:
                status = "200 OK"
                usage = {"prompt_tokens": 3, "completion_tokens": 1}
                body = event(choices=[{"text": "x"}], usage=usage) + b"data: [DONE]\r\n\r\n"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
        writer.close()

    async def measured(*words: str) -> int:
        server = await asyncio.start_server(others, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        at = ["bench", "--url", f"http://127.0.0.1:{port}/v1", "--num-prompts", "3"]
        status = await asyncio.to_thread(main, [*at, *words], {})
        server.close()
        return status

    assert asyncio.run(measured()) == 0
    assert "Successful requests:                     3 " in capsys.readouterr().out
    assert asyncio.run(measured("--prompts", "embeds")) == 1
    assert "does not say the hidden size" in capsys.readouterr().err


def test_neither_chat_nor_bench_needs_torch() -> None:
    code = (
        "import sys; import inlay_tools.bench, inlay_tools.bench.writing, inlay_tools.chat; "
        "print([name for name in ('torch', 'transformers', 'openai') if name in sys.modules])"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"


def test_a_key_that_may_not_ask_is_one_line(
    llama: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = llama.serve(api_key=["sesame"])
    assert main(["bench", "--url", locked + "/v1"], {}) == 1
    assert "API key" in capsys.readouterr().err
