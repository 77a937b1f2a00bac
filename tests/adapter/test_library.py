"""Sources of adapters: allowed ones only, complete, once, and within limits."""

import hashlib
import socket
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from huggingface_hub.errors import HfHubHTTPError
from hypothesis import given, strategies

from inlay.adapter.address import AdapterAddress, AllowedSources, parse
from inlay.adapter.library import AdapterLibrary
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.tensors.hub import asking_hub
from tests.adapter.conftest import Write, pair, tensors
from tests.adapter.web import Web, web
from tests.certificates import certificate

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def site() -> Iterator[Web]:
    with web() as served:
        yield served


def library(
    *allowed: str, cache: Path | None = None, max_bytes: int = 1 << 20, cache_bytes: int = 1 << 30
) -> AdapterLibrary:
    return AdapterLibrary(allowed, cache_dir=cache, cache_bytes=cache_bytes, max_bytes=max_bytes)


def sha256(directory: Path) -> str:
    return hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()


class TestAddresses:
    @pytest.mark.parametrize(
        "text",
        [
            "", "x" * 3000, "a\nb", "ftp://host/x", "gopher://host/", "data://x", "file://host/x", "https://", "https:///x",
            "https://user@host/x", "https://user:password@host/x", "https://host/x?y=1", "https://host/x#y", "https://host/a/../b",
            "https://host/./a", "https://host/a//b", "https://host/%2e%2e/b", "https://host/a%2Fb", "https://host/a%5cb", "https://host/a%00",
            "https://host\\evil/x", "https://host/a\\..\\b", "https://ho st/x", "https://host:x/", "https://h\u00f6st/", "s3://b@d/x", "hf://a/b?x",
            "https://host/a%252e", "http://[::1/x",
        ],
    )  # fmt: skip
    def test_what_two_programs_may_read_differently_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequestError):
            parse(text)

    @pytest.mark.parametrize(
        ("prefix", "inside", "outside"),
        [
            (
                "https://host/adapters/",
                ["https://host/adapters/a", "https://HOST/adapters/a/b", "HTTPS://host/adapters"],
                [
                    "https://host/adaptersx/a", "https://host/", "http://host/adapters/a", "https://host:8443/adapters/a",
                    "https://host.evil/adapters/a", "https://evilhost/adapters/a", "s3://host/adapters/a",
                ],
            ),
            ("s3://bucket", ["s3://bucket/a", "s3://bucket/a/b"], ["s3://bucket2/a", "s3://Bucket/a", "https://bucket/a"]),
            ("hf://org/name", ["hf://org/name"], ["hf://org/name2", "hf://org2/name", "hf://org"]),
        ],
    )  # fmt: skip
    def test_what_may_be_asked_for_lies_below_a_prefix(
        self, prefix: str, inside: list[str], outside: list[str]
    ) -> None:
        allowed = AllowedSources([prefix])
        for text in inside:
            allowed.check(parse(text))
        for text in outside:
            with pytest.raises(InvalidRequestError, match="--allowed-lora-sources"):
                allowed.check(parse(text))

    @given(strategies.text(max_size=60).map(lambda text: f"https://host{text}"))
    def test_no_address_is_of_another_host_than_it_says(self, text: str) -> None:
        try:
            address = parse(text)
            AllowedSources(["https://host/a/"]).check(address)
        except InvalidRequestError:
            return
        parts = urlsplit(str(address))
        assert (parts.scheme, parts.hostname, parts.port) == ("https", "host", None)
        assert parts.path.split("/")[1] == "a"
        assert ".." not in parts.path.split("/")


class TestLocal:
    def test_a_directory_is_taken_where_it_is(self, write: Write, tmp_path: Path) -> None:
        path = write()
        for address in (str(path), f"file://{path}"):
            opened = library(f"file://{tmp_path}").open(address, sha256(path))
            assert opened.files.directory == path

    def test_nothing_outside_the_allowed_directories_is_read(
        self, write: Write, tmp_path: Path
    ) -> None:
        outside = write(directory=tmp_path / "outside")
        (tmp_path / "inside").mkdir()
        allowed = library(f"file://{tmp_path / 'inside'}/")
        link = tmp_path / "inside" / "link"
        link.symlink_to(outside)
        files = tmp_path / "inside" / "files"
        files.mkdir()
        for name in ("adapter_config.json", WEIGHTS):
            (files / name).symlink_to(outside / name)
        for path in (outside, link, files, f"{tmp_path}/inside/../outside", f"{tmp_path}/inside2"):
            with pytest.raises(InvalidRequestError, match="may not come from"):
                allowed.open(str(path))

    @pytest.mark.parametrize(
        "path", ["~nobody-has-this-name/a", "loop", "a" * 300, "a" * 300 + "/b"]
    )
    def test_a_path_that_no_file_has_is_refused(
        self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(InvalidRequestError):
            library("file:///", "hf://org/").open(path)

    def test_a_checksum_that_differs_is_refused(self, write: Write) -> None:
        path = write()
        with pytest.raises(InvalidRequestError, match="has the SHA-256"):
            library("file:///").open(str(path), "0" * 64)
        with pytest.raises(InvalidRequestError, match="64 hex digits"):
            library("file:///").open(str(path), "0" * 63)


class TestWeb:
    def test_it_is_fetched_and_is_the_same(self, site: Web, write: Write, tmp_path: Path) -> None:
        path = write()
        url = site.put("/adapters/a", path)
        shelf = library(f"{site.url}/adapters/", cache=tmp_path / "cache")
        opened = shelf.open(url)
        local = library("file:///").open(str(path))
        assert opened.content_id == local.content_id
        assert opened.files.directory.is_relative_to(tmp_path / "cache")
        assert {headers["accept-encoding"] for _, headers in site.asked} == {"identity"}
        opened.close()

    def test_what_a_checksum_names_is_fetched_once(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        path = write()
        url = site.put("/a", path)
        for _ in range(3):
            library(site.url, cache=tmp_path / "cache").open(url, sha256(path)).close()
        assert site.paths.count(f"/a/{WEIGHTS}") == 1
        (kept,) = (tmp_path / "cache").iterdir()
        assert kept.name.startswith(sha256(path))

    def test_without_a_checksum_what_has_changed_there_is_fetched_again(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        url = site.put("/a", write())
        shelf = library(site.url, cache=tmp_path / "cache")
        first = shelf.open(url)
        site.put("/a", write(None, tensors({name: 2 * value for name, value in pair().items()})))
        assert shelf.open(url).content_id != first.content_id

    def test_a_checksum_that_differs_leaves_nothing(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        url = site.put("/a", write())
        with pytest.raises(InvalidRequestError, match="has the SHA-256"):
            library(site.url, cache=tmp_path / "cache").open(url, "0" * 64)
        assert not list((tmp_path / "cache").iterdir())

    def test_what_is_no_adapter_is_not_kept(self, site: Web, write: Write, tmp_path: Path) -> None:
        url = site.put("/a", write(None, b"\xff" * 100))
        with pytest.raises(InvalidRequestError):
            library(site.url, cache=tmp_path / "cache").open(url)
        assert not list((tmp_path / "cache").iterdir())

    def test_a_lora_of_a_pipeline_is_one_file(self, site: Web, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.mkdir()
        file = path / "pytorch_lora_weights.safetensors"
        file.write_bytes(tensors(pair(module="unet.to_q")))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        local = library("file:///").open(str(path), digest)
        url = site.put("/a", path)
        for _ in range(2):
            opened = library(site.url, cache=tmp_path / "cache").open(url, digest)
            assert opened.content_id == local.content_id
            opened.close()
        assert site.paths.count(f"/a/{file.name}") == 1
        with pytest.raises(InvalidRequestError, match="has the SHA-256"):
            library("file:///").open(str(path), "0" * 64)

    def test_what_is_not_there_is_not_found(self, site: Web, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="answered 404"):
            library(site.url, cache=tmp_path).open(f"{site.url}/none")

    def test_too_large_a_file_is_cut_off(self, site: Web, write: Write, tmp_path: Path) -> None:
        url = site.put("/a", write())

        def endless(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("connection", "close")
            handler.end_headers()
            try:
                while True:
                    handler.wfile.write(bytes(65536))
            except OSError:
                pass
            handler.close_connection = True

        site.instead[f"/a/{WEIGHTS}"] = endless
        with pytest.raises(InvalidRequestError, match="more than the 100000 bytes"):
            library(site.url, cache=tmp_path / "cache", max_bytes=100_000).open(url)
        site.instead["/a/adapter_config.json"] = endless
        with pytest.raises(InvalidRequestError, match="more than the 1048576 bytes"):
            library(site.url, cache=tmp_path / "cache").open(url)
        assert not list((tmp_path / "cache").iterdir())

    def test_a_server_that_fails_is_a_clear_refusal(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        url = site.put("/a", write())

        def answering(status: int, *headers: tuple[str, str], body: bytes = b"") -> None:
            def answer(handler: BaseHTTPRequestHandler) -> None:
                handler.send_response(status)
                for name, value in headers:
                    handler.send_header(name, value)
                handler.end_headers()
                handler.wfile.write(body)
                handler.close_connection = True

            site.instead[f"/a/{WEIGHTS}"] = answer

        shelf = library(site.url, cache=tmp_path / "cache")
        for status in (403, 500, 304, 401):
            answering(status, ("content-length", "0"))
            with pytest.raises(InvalidRequestError, match=f"answered {status}"):
                shelf.open(url)
        answering(200, ("content-length", "1000"), body=b"short")
        with pytest.raises(InvalidRequestError):
            shelf.open(url)
        answering(200, ("content-encoding", "gzip"), ("content-length", "3"), body=b"abc")
        with pytest.raises(InvalidRequestError, match="content-encoding"):
            shelf.open(url)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(InvalidRequestError, match="cannot be had: Connection refused"):
                library(nowhere, cache=tmp_path / "cache").open(f"{nowhere}/a")

    def test_a_redirection_within_what_is_allowed_is_followed(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        site.put("/real/a", write())
        for name in ("adapter_config.json", WEIGHTS):
            site.redirect(f"/a/{name}", f"{site.url}/real/a/{name}?signature=5")
        library(f"{site.url}/a", f"{site.url}/real", cache=tmp_path).open(f"{site.url}/a").close()
        assert f"/real/a/{WEIGHTS}?signature=5" in site.paths

    def test_a_redirection_to_elsewhere_is_not_followed(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        path = write()
        site.put("/secret", path)
        allowed = library(f"{site.url}/a/", cache=tmp_path / "cache")
        with web() as inner:
            inner.put("/", path)
            for target in (
                f"{site.url}/secret/adapter_config.json",
                f"{inner.url}/adapter_config.json",
                "/secret/adapter_config.json",
                f"{site.url}/a/../secret/adapter_config.json",
                f"{site.url}/a/%2e%2e/secret/adapter_config.json",
                f"file://{path}/adapter_config.json",
                "ftp://127.0.0.1/adapter_config.json",
                "http://169.254.169.254/latest/meta-data/",
            ):
                site.asked.clear()
                site.redirect("/a/x/adapter_config.json", target)
                with pytest.raises(InvalidRequestError):
                    allowed.open(f"{site.url}/a/x")
                assert site.paths == ["/a/x/adapter_config.json"]
            assert inner.asked == []

    def test_redirections_that_never_end_do(self, site: Web, tmp_path: Path) -> None:
        site.redirect("/a/adapter_config.json", f"{site.url}/a/adapter_config.json")
        with pytest.raises(InvalidRequestError):
            library(site.url, cache=tmp_path).open(f"{site.url}/a")
        assert len(site.asked) < 12


def test_over_https_the_server_must_show_a_certificate_that_is_trusted(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, key = certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with web(context) as site:
        url = site.put("/a", write())
        with pytest.raises(InvalidRequestError, match="certificate"):
            library(site.url, cache=tmp_path / "cache").open(url)
        assert not site.asked
        monkeypatch.setenv("SSL_CERT_FILE", str(chain))
        library(site.url, cache=tmp_path / "cache").open(url).close()
        assert f"/a/{WEIGHTS}" in site.paths


class TestS3:
    KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"

    @pytest.fixture
    def environment(self, site: Web, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", site.url)
        monkeypatch.setenv("AWS_REGION", "eu-west-3")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", self.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", self.SECRET)

    @pytest.mark.usefixtures("environment")
    @pytest.mark.parametrize("token", [None, "a-session/token=="])
    def test_every_request_carries_the_signature_that_botocore_makes(
        self,
        site: Web,
        write: Write,
        tmp_path: Path,
        token: str | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if token is not None:
            monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        site.put("/bucket/dir/a~(1)", write())
        site.files |= {path.replace("(1)", "%281%29"): data for path, data in site.files.items()}
        library("s3://bucket/dir/", cache=tmp_path / "cache").open("s3://bucket/dir/a~(1)").close()
        assert len(site.asked) == 2
        for path, headers in site.asked:
            request = AWSRequest("GET", site.url + path)
            request.context["timestamp"] = headers["x-amz-date"]
            auth = S3SigV4Auth(Credentials(self.KEY, self.SECRET, token), "s3", "eu-west-3")
            request.headers["X-Amz-Content-SHA256"] = hashlib.sha256(b"").hexdigest()
            if token is not None:
                request.headers["X-Amz-Security-Token"] = token
            request.headers["X-Amz-Date"] = headers["x-amz-date"]
            request.headers["host"] = urlsplit(site.url).netloc
            names = headers["authorization"].split("SignedHeaders=")[1].split(",")[0]
            canonical = auth.canonical_request(request)
            assert canonical.split("\n")[-2] == names
            expected = auth.signature(auth.string_to_sign(request, canonical), request)
            assert headers["authorization"].endswith(f"Signature={expected}")

    @pytest.mark.usefixtures("environment")
    def test_without_keys_nothing_is_signed(
        self, site: Web, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        site.put("/bucket/a", write())
        library("s3://bucket", cache=tmp_path / "cache").open("s3://bucket/a").close()
        assert all("authorization" not in headers for _, headers in site.asked)

    @pytest.mark.usefixtures("environment")
    def test_a_redirection_is_not_followed_with_or_without_the_signature(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        site.put("/bucket/b", write())
        site.redirect("/bucket/a/adapter_config.json", f"{site.url}/bucket/b/adapter_config.json")
        with pytest.raises(InvalidRequestError, match="redirection"):
            library("s3://bucket", cache=tmp_path / "cache").open("s3://bucket/a")
        assert site.paths == ["/bucket/a/adapter_config.json"]

    @pytest.mark.usefixtures("environment")
    def test_another_bucket_is_not_asked(self, site: Web, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match="may not come from"):
            library("s3://bucket", cache=tmp_path).open("s3://other/a")
        assert site.asked == []


class TestCache:
    def test_what_was_used_last_stays_within_the_bytes_allowed(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        size = len(tensors(pair()))
        shelf = library(site.url, cache=tmp_path / "cache", cache_bytes=int(size * 2.9))
        opened = []
        for number in range(4):
            matrices = {name: value * (number + 1) for name, value in pair().items()}
            url = site.put(f"/{number}", write(None, tensors(matrices)))
            opened.append(shelf.open(url))
        # All are in use, so all are kept; of two that no longer are, one is enough.
        assert all(one.files.directory.exists() for one in opened)
        opened[1].close()
        opened[0].close()
        shelf.open(
            site.put("/9", write(None, tensors({n: v * 9 for n, v in pair().items()})))
        ).close()
        assert not opened[0].files.directory.exists()
        assert not opened[1].files.directory.exists()
        assert opened[2].files.directory.exists()

    def test_a_temporary_cache_goes_with_its_library(self, site: Web, write: Write) -> None:
        shelf = library(site.url)
        opened = shelf.open(site.put("/a", write()))
        assert opened.files.directory.exists()
        opened.close()
        shelf.close()
        assert not opened.files.directory.parent.exists()

    def test_several_may_fetch_the_same_at_once(
        self, site: Web, write: Write, tmp_path: Path
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        url = site.put("/a", write())

        def fetch(_: int) -> Path:
            return library(site.url, cache=tmp_path / "cache").open(url).files.directory

        with ThreadPoolExecutor(6) as pool:
            assert len(set(pool.map(fetch, range(12)))) == 1
        assert len(list((tmp_path / "cache").iterdir())) == 1


class TestHub:
    """With a separate cache, offline, as under `HF_HUB_OFFLINE`."""

    @pytest.fixture
    def cached(self, tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
        import huggingface_hub.constants as constants

        commit = "1" * 40
        repo = tmp_path / "hub" / "models--org--name"
        write(directory=repo / "snapshots" / commit)
        write(directory=repo / "snapshots" / commit / "deep" / "er")
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(
            "huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False
        )
        return repo / "snapshots" / commit

    def test_a_name_on_the_hub_is_taken_from_its_cache(self, cached: Path, tmp_path: Path) -> None:
        shelf = library("hf://org/", cache=tmp_path / "cache")
        assert shelf.open("hf://org/name").files.directory == cached
        assert shelf.open("org/name").files.directory == cached
        assert shelf.open(f"hf://org/name@{'1' * 40}").files.directory == cached
        assert shelf.open("hf://org/name/deep/er").files.directory == cached / "deep" / "er"

    def test_a_lora_of_a_pipeline_is_taken_from_it(self, cached: Path, tmp_path: Path) -> None:
        (cached / "ink").mkdir()
        file = cached / "ink" / "pytorch_lora_weights.safetensors"
        file.write_bytes(tensors(pair(module="unet.to_q")))
        shelf = library("hf://org/", cache=tmp_path / "cache")
        opened = shelf.open("hf://org/name/ink")
        assert opened.files.directory == file.parent
        assert opened.files.names == (file.name,)

    @pytest.mark.usefixtures("cached")
    @pytest.mark.parametrize(
        "address", ["hf://org/other", "hf://org/name/none", "hf://org/name@v9"]
    )
    def test_what_is_not_there_is_not_found(self, address: str, tmp_path: Path) -> None:
        with pytest.raises(InlayError) as found:
            library("hf://org/", cache=tmp_path).open(address)
        assert isinstance(found.value, NotFoundError)

    @pytest.mark.usefixtures("cached")
    def test_a_hub_that_cannot_be_reached_is_a_clear_refusal(self) -> None:
        # Of the library that the hub's client asks with; under test it is offline.
        unreached = HfHubHTTPError.__bases__[0]("All connection attempts failed")
        with pytest.raises(InvalidRequestError, match="cannot be reached"), asking_hub("org/name"):
            raise unreached

    def test_who_is_not_allowed_is_not_asked(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match="may not come from"):
            library("hf://others/", cache=tmp_path).open("hf://org/name")
        with pytest.raises(InlayError):
            library("file:///", cache=tmp_path).open("org/name")


def test_an_address_without_its_query_is_what_is_shown() -> None:
    assert AdapterAddress("https", "host", "/a", "signature=5").shown == "https://host/a"
