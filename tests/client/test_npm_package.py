"""The npm package `inlay-embeds`, under Node and against a real server."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from inlay.tensors import write
from tests.live import fleet
from tests.models import tiny
from tests.serving import serving

PACKAGE = Path(__file__).resolve().parents[2] / "clients" / "inlay-embeds"
NODE, NPM = shutil.which("node"), shutil.which("npm")

TYPED = """
import OpenAI from "openai";
import { chatPart, completionArgs, safetensors, Uploader, type StoredEmbeds } from "inlay-embeds";

const client = new OpenAI({ apiKey: "unused" });
const file: Uint8Array = safetensors({ data: new Float32Array(4), hiddenSize: 2 }, { dtype: "BF16" });
const stored: StoredEmbeds = await new Uploader("http://host/v1").upload(file);
const content = [chatPart(stored.id) as any];
await client.chat.completions.create({ model: "m", messages: [{ role: "user", content }] });
await client.completions.create({ model: "m", ...completionArgs(file) });
// @ts-expect-error: no plain list
safetensors({ data: [1, 2], hiddenSize: 2 });
// @ts-expect-error: no such dtype
safetensors({ data: new Float32Array(4), hiddenSize: 2 }, { dtype: "F64" });
"""

pytestmark = pytest.mark.skipif(NODE is None or NPM is None, reason="Node is not installed")


def run(*command: str | None, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [word or "" for word in command],
        cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(*arguments: str, cwd: Path) -> None:
    quiet = ("--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund")
    done = subprocess.run(
        [NPM or "", *arguments, *quiet],
        cwd=cwd, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        # A lock that is not the manifest's is our fault, a registry out of reach is not.
        assert "EUSAGE" not in done.stderr, done.stderr
        pytest.skip("npm cannot install packages here")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with its compiler, and compiled as for publishing."""
    copy = tmp_path_factory.mktemp("npm") / "inlay-embeds"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("node_modules", "dist"))
    install("ci", cwd=copy)
    run(NPM, "run", "build", cwd=copy)
    return copy


@pytest.mark.slow
def test_its_own_tests_pass_against_a_server(package: Path) -> None:
    with fleet(tiny("llama")) as running:
        url = running.serve(enable_prompt_embeds=True)
        arguments = ("--test", "--test-reporter=tap", "test/")
        said = run(NODE, *arguments, cwd=package, INLAY_URL=url + "/v1")
    assert "# fail 0" in said
    assert "# skipped 0" in said


@pytest.mark.thorough
@pytest.mark.parametrize("table_id", [None, "0123"])
def test_it_writes_the_bytes_that_the_python_client_writes(
    package: Path, table_id: str | None
) -> None:
    values = np.array([[0.0, -1.5, 1 / 3, 1e-40], [3e38, 1.00390625, 1.01171875, -7.0]], np.float32)
    rows: Any = {"hiddenSize": 4, "data": values.ravel().tolist()}
    script = f"""
import {{ safetensors }} from "inlay-embeds";
const rows = {json.dumps(rows)};
rows.data = Float32Array.from(rows.data);
for (const dtype of ["F32", "BF16"])
  console.log(Buffer.from(safetensors(rows, {{ dtype, tableId: {json.dumps(table_id)} ?? undefined }})).toString("hex"));
"""
    found = run(NODE, "--input-type=module", "--eval", script, cwd=package).split()
    arrays = (values, values.astype(ml_dtypes.bfloat16))
    assert found == [write(array, "safetensors", table_id=table_id).hex() for array in arrays]


@pytest.mark.slow
def test_what_its_page_shows_runs_with_the_openai_package_and_is_well_typed(
    package: Path, tmp_path: Path
) -> None:
    file = package / run(NPM, "pack", "--silent", cwd=package).split()[-1]
    install("install", str(file), "openai@7", "typescript@7", cwd=tmp_path)
    page = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```js\n(.*?)^```", page, re.M | re.S)
    with serving(command="demo") as server:
        script = tmp_path / "shown.mjs"
        script.write_text(shown.replace("http://127.0.0.1:8000", server.url), encoding="utf-8")
        assert run(NODE, str(script), cwd=tmp_path).strip()
    (tmp_path / "typed.mts").write_text(TYPED, encoding="utf-8")
    tsc = tmp_path / "node_modules" / "typescript" / "bin" / "tsc"
    options = "--noEmit --strict --target es2022 --module nodenext --skipLibCheck"
    run(NODE, str(tsc), *options.split(), "typed.mts", cwd=tmp_path)
