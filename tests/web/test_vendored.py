"""Libraries in the tree are the files of their packages, and the pages run no others."""

import hashlib
from pathlib import Path

import httpx
import pytest

from inlay import web
from tests.live import Fleet

ROOM = Path(web.__file__).parent
TESTS = Path(__file__).parent

VENDORED = {
    # file: (package and version, licence, file in the package, SHA-256)
    ROOM / "vendor" / "preact.mjs": (
        "preact 11.2.0", "MIT", "dist/preact.mjs",
        "bdcbd9abdf2c77c5c45326eab42191e949222d479d0d5f69467387a77040cb55",
    ),
    ROOM / "vendor" / "htm.mjs": (
        "htm 3.1.1", "Apache-2.0", "dist/htm.module.js",
        "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    ),
    TESTS / "vendor" / "axe.min.js": (
        "axe-core 4.14.1", "MPL-2.0", "axe.min.js",
        "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", VENDORED, ids=lambda path: path.name)
def test_a_vendored_file_is_that_of_its_package(path: Path) -> None:
    package, _, _, digest = VENDORED[path]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    licence = path.parent / f"{package.split()[0]}.LICENSE"
    assert licence.stat().st_size > 1000


def test_no_other_library_is_there() -> None:
    kept = {file for room in (ROOM, TESTS) for file in (room / "vendor").iterdir()}
    assert {file for file in kept if file.suffix != ".LICENSE"} == set(VENDORED)


def test_the_pages_hold_no_script_and_reach_for_nothing_elsewhere() -> None:
    for file in [*ROOM.glob("*.html"), *ROOM.glob("*.mjs"), *ROOM.glob("*.css")]:
        text = file.read_text(encoding="utf-8")
        assert "<script>" not in text
        assert "<style" not in text
        for word in ("eval(", "new Function", "innerHTML", "dangerouslySet", "http://", "https://",
                     "localStorage", "sessionStorage"):  # fmt: skip
            assert word not in text, (file.name, word)
        lines = text.splitlines()
        assert len(lines) <= 500
        assert [line for line in lines if len(line) > 100] == [], file.name


@pytest.mark.parametrize("path", ["/", "/fleet"])
def test_only_files_of_the_server_may_run_and_nobody_may_frame_them(url: str, path: str) -> None:
    response = httpx.get(url + path)
    policy = dict(
        directive.strip().split(" ", 1)
        for directive in response.headers["content-security-policy"].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_pages_lead_to_the_fleet_only_where_somebody_can_be_an_admin(llama: Fleet) -> None:
    nobody, user = llama.serve(), llama.serve(api_key=["user"])
    chief = llama.serve(api_key=["user"], admin_api_key=["chief"])
    looking = llama.serve(admin_port=0)
    for url, leads in ((nobody, False), (user, False), (chief, True), (looking, True)):
        for path in ("/", "/start", "/docs"):
            page = httpx.get(url + path).text
            assert ("data-admins" in page or '<a href="fleet">' in page) == leads, (url, path)
        # Whoever goes there all the same is told what it takes.
        assert "fleet.mjs" in httpx.get(f"{url}/fleet").text


def test_files_of_the_pages_are_served_as_they_lie_and_nothing_beside_them(url: str) -> None:
    script = httpx.get(f"{url}/web/playground.mjs")
    assert script.content == (ROOM / "playground.mjs").read_bytes()
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    again = httpx.get(
        f"{url}/web/playground.mjs", headers={"if-none-match": script.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    for name in ("__init__.py", "..%2f__init__.py", "vendor/preact.mjs", "preact.LICENSE", ""):
        assert httpx.get(f"{url}/web/{name}").status_code == 404
