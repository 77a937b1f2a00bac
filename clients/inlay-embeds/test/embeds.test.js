import assert from "node:assert/strict";
import { createServer } from "node:http";
import test from "node:test";

import { chatPart, completionArgs, InlayError, safetensors, Uploader } from "inlay-embeds";

const url = process.env.INLAY_URL;
const hiddenSize = Number(process.env.INLAY_HIDDEN_SIZE ?? 48);
const rows = { data: Float32Array.from({ length: 20 * hiddenSize }, (_, n) => Math.sin(n)), hiddenSize };

async function post(path, body) {
  const response = await fetch(url + path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ max_tokens: 8, temperature: 0, ...body }),
  });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error.message), { status: response.status, code: answer.error.code });
  return answer.choices[0];
}

/** A server that answers `answers` in turn, each [status, headers, body], or cuts the connection. */
async function scripted(answers, use) {
  const seen = [];
  const server = createServer((request, response) => {
    request.resume().on("end", () => {
      seen.push(`${request.method} ${request.url}`);
      const answer = answers.shift();
      if (answer === null) return request.socket.destroy();
      response.writeHead(answer[0], answer[1]).end(answer[2]);
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  try {
    await use(`http://127.0.0.1:${server.address().port}/v1`);
  } finally {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  }
  return seen;
}

test("rows that are none are refused with what came", () => {
  for (const data of [[1, 2], new Float64Array(4)])
    assert.throws(() => safetensors({ data, hiddenSize: 2 }), /Float32Array/);
  for (const [length, hiddenSize] of [[3, 2], [0, 2], [4, 0], [4, 1.5]])
    assert.throws(() => safetensors({ data: new Float32Array(length), hiddenSize }), /whole rows/);
  assert.throws(() => safetensors(rows, { dtype: "F64" }), /got "F64"/);
  assert.throws(() => safetensors(rows, { tableId: "é" }), /ASCII/);
});

test("a part is base64 of a file, or the id of a stored one", () => {
  const file = safetensors(rows);
  const data = Buffer.from(file).toString("base64");
  assert.deepEqual(chatPart(file), { type: "prompt_embeds", data });
  assert.deepEqual(chatPart("pe-1"), { type: "prompt_embeds", ref: "pe-1" });
  assert.deepEqual(completionArgs(file), { prompt: null, prompt_embeds: data });
  assert.deepEqual(completionArgs("pe-1"), { prompt: null, prompt_embeds: { ref: "pe-1" } });
});

test("a server that is full or gone is asked again, and no other", async () => {
  const full = [503, { "retry-after": "0" }, "full"];
  const error = JSON.stringify({ error: { message: "no", code: "c", param: "p" } });
  const stored = [200, {}, '{"id": "pe-1"}'];
  const seen = await scripted([full, null, stored, [400, {}, error], full, full, full], async (url) => {
    const uploader = new Uploader(url);
    assert.equal((await uploader.upload(new Uint8Array(9), { model: "a b" })).id, "pe-1");
    const refused = { name: "InlayError", status: 400, code: "c", param: "p", message: "no" };
    await assert.rejects(uploader.get("a/b"), refused);
    await assert.rejects(uploader.get("c"), (error) => error instanceof InlayError && error.status === 503);
  });
  const upload = "POST /v1/prompt_embeds?model=a%20b";
  const again = Array(3).fill("GET /v1/prompt_embeds/c");
  assert.deepEqual(seen, [upload, upload, upload, "GET /v1/prompt_embeds/a%2Fb", ...again]);
});

test("a long wait is the caller's, and a deletion whose answer was lost is done", async () => {
  const answers = [[429, { "retry-after": "61" }, "later"], null, [404, {}, "gone"]];
  await scripted(answers, async (url) => {
    const uploader = new Uploader(url);
    await assert.rejects(uploader.get("a"), { status: 429 });
    await uploader.delete("a");
  });
});

test("rows by value and by reference are one prompt to a server", { skip: !url && "no INLAY_URL" }, async () => {
  const uploader = new Uploader(url, { uploadFrom: 1000 });
  const file = safetensors(rows);
  const [ref, same] = await Promise.all([uploader.source(file), uploader.source(file)]);
  assert.match(ref, /^pe-/);
  assert.equal(ref, same);
  const small = safetensors({ data: new Float32Array(hiddenSize), hiddenSize });
  assert.equal(await uploader.source(small), small);
  const texts = [];
  for (const source of [file, ref]) {
    texts.push((await post("/completions", completionArgs(source))).text);
    const content = [{ type: "text", text: "look: " }, chatPart(source)];
    texts.push((await post("/chat/completions", { messages: [{ role: "user", content }] })).message.content);
  }
  assert.deepEqual(texts.slice(0, 2), texts.slice(2));
  assert.equal((await uploader.get(ref)).num_tokens, 20);
  assert.equal((await uploader.pin(ref)).pinned, true);
});

test("a request whose reference is gone is made again", { skip: !url && "no INLAY_URL" }, async () => {
  const uploader = new Uploader(url, { uploadFrom: 1000 });
  const file = safetensors({ ...rows, data: rows.data.map((value) => value / 2) });
  const asked = async () => post("/completions", completionArgs(await uploader.source(file)));
  const { text } = await asked();
  await new Uploader(url).delete(await uploader.ref(file));
  await assert.rejects(asked(), { status: 404 });
  assert.equal((await uploader.retrying(asked)).text, text);
  let tries = 0;
  const wrong = () => (tries++, post("/completions", { model: "nobody", prompt: "a" }));
  await assert.rejects(uploader.retrying(wrong), { status: 404 });
  assert.equal(tries, 1);
});
