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
NODE = shutil.which("node")

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

pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


def node(*arguments: str, cwd: Path = PACKAGE, **variables: str) -> str:
    done = subprocess.run(
        [NODE or "node", *arguments],
        cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_pass_against_a_server() -> None:
    with fleet(tiny("llama")) as running:
        url = running.serve(enable_prompt_embeds=True)
        said = node("--test", "--test-reporter=tap", "test/", INLAY_URL=url + "/v1")
    assert "# fail 0" in said
    assert "# skipped 0" in said


@pytest.mark.parametrize("table_id", [None, "0123"])
def test_it_writes_the_bytes_that_the_python_client_writes(table_id: str | None) -> None:
    values = np.array([[0.0, -1.5, 1 / 3, 1e-40], [3e38, 1.00390625, 1.01171875, -7.0]], np.float32)
    rows: Any = {"hiddenSize": 4, "data": values.ravel().tolist()}
    script = f"""
import {{ safetensors }} from "./index.js";
const rows = {json.dumps(rows)};
rows.data = Float32Array.from(rows.data);
for (const dtype of ["F32", "BF16"])
  console.log(Buffer.from(safetensors(rows, {{ dtype, tableId: {json.dumps(table_id)} ?? undefined }})).toString("hex"));
"""
    found = node("--input-type=module", "--eval", script).split()
    arrays = (values, values.astype(ml_dtypes.bfloat16))
    assert found == [write(array, "safetensors", table_id=table_id).hex() for array in arrays]


@pytest.mark.slow
def test_what_its_page_shows_runs_with_the_openai_package_and_is_well_typed(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    names = (f"file:{PACKAGE}", "openai@7", "typescript@7")
    installed = npm is not None and subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *names],
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    if not installed or installed.returncode:
        pytest.skip("npm cannot install packages here")
    page = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```js\n(.*?)^```", page, re.M | re.S)
    with serving(command="demo") as server:
        script = tmp_path / "shown.mjs"
        script.write_text(shown.replace("http://127.0.0.1:8000", server.url), encoding="utf-8")
        assert node(str(script), cwd=tmp_path).strip()
    (tmp_path / "typed.mts").write_text(TYPED, encoding="utf-8")
    tsc = tmp_path / "node_modules" / "typescript" / "bin" / "tsc"
    options = (
        "--noEmit",
        "--strict",
        "--target",
        "es2022",
        "--module",
        "nodenext",
        "--skipLibCheck",
    )
    node(str(tsc), *options, "typed.mts", cwd=tmp_path)
