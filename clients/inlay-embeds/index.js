/** Prompt embeddings for the `openai` package: see index.d.ts for types, README.md for examples. */

const MAX_WAIT_MS = 60_000;

/** Least bytes of a file that servers accept. */
const MIN_BYTES = 100;

/** Rounds to the nearest bfloat16, halves to even; NaN stays NaN. */
function bfloat16(data) {
  const bits = new Uint32Array(data.buffer, data.byteOffset, data.length);
  return Uint16Array.from(bits, (value) =>
    (value & 0x7fffffff) > 0x7f800000
      ? (value >>> 16) | 0x40
      : (value + 0x7fff + ((value >>> 16) & 1)) >>> 16,
  );
}

export function safetensors({ data, hiddenSize }, { dtype = "F32", tableId } = {}) {
  if (!(data instanceof Float32Array)) throw new TypeError("data must be a Float32Array");
  if (!Number.isInteger(hiddenSize) || hiddenSize < 1 || !data.length || data.length % hiddenSize)
    throw new RangeError(
      `data must be whole rows of ${hiddenSize} elements, and at least one; got ${data.length}`,
    );
  if (dtype !== "F32" && dtype !== "BF16")
    throw new RangeError(`dtype must be "F32" or "BF16", got ${JSON.stringify(dtype)}`);
  if (tableId !== undefined && !/^[ -~]{1,128}$/.test(tableId))
    throw new RangeError("tableId must have 1 to 128 ASCII characters");
  const elements = dtype === "F32" ? data : bfloat16(data);
  const shape = [data.length / hiddenSize, hiddenSize];
  const header = JSON.stringify({
    ...(tableId === undefined ? {} : { __metadata__: { embedding_table_id: tableId } }),
    prompt_embeds: { dtype, shape, data_offsets: [0, elements.byteLength] },
  });
  const least = Math.max(header.length, MIN_BYTES - 8 - elements.byteLength);
  const text = new TextEncoder().encode(header.padEnd(Math.ceil(least / 8) * 8));
  const file = new Uint8Array(8 + text.length + elements.byteLength);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length), true);
  file.set(text, 8);
  file.set(new Uint8Array(elements.buffer, elements.byteOffset, elements.byteLength), 8 + text.length);
  return file;
}

/** Base64 in pieces, as a call takes only so many arguments. */
function base64(bytes) {
  let text = "";
  for (let start = 0; start < bytes.length; start += 0x8000)
    text += String.fromCharCode(...bytes.subarray(start, start + 0x8000));
  return btoa(text);
}

const placed = (source) =>
  typeof source === "string" ? { ref: source } : { data: base64(source) };

export const chatPart = (source) => ({ type: "prompt_embeds", ...placed(source) });

export function completionArgs(source) {
  const place = placed(source);
  return { prompt: null, prompt_embeds: place.data ?? place };
}

export class InlayError extends Error {
  constructor(status, message, { code = null, param = null } = {}) {
    super(message);
    this.name = "InlayError";
    Object.assign(this, { status, code, param });
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new InlayError(response.status, error.message, error);
  } catch {
    return new InlayError(response.status, `the server answered ${response.status}: ${text.slice(0, 200)}`);
  }
}

export class Uploader {
  #url;
  #options;
  #known = new WeakMap();

  constructor(baseURL, { apiKey, uploadFrom = 65536, maxRetries = 2, fetch = globalThis.fetch } = {}) {
    this.#url = new URL(baseURL).href.replace(/\/+$/, "") + "/prompt_embeds";
    this.#options = { apiKey, uploadFrom, maxRetries, fetch };
  }

  async source(file) {
    return file.length < this.#options.uploadFrom ? file : this.ref(file);
  }

  async ref(file) {
    let known = this.#known.get(file);
    if (known === undefined) {
      known = this.upload(file).then(({ id }) => id);
      // Several requests at once upload once; one that failed is not kept.
      known.catch(() => this.#known.delete(file));
      this.#known.set(file, known);
    }
    return known;
  }

  async upload(file, { model } = {}) {
    const query = model === undefined ? "" : `?model=${encodeURIComponent(model)}`;
    return (await this.#ask("POST", query, file, "application/octet-stream")).json();
  }

  async get(id) {
    return (await this.#ask("GET", `/${encodeURIComponent(id)}`)).json();
  }

  async pin(id, pinned = true) {
    const body = JSON.stringify({ pinned });
    return (await this.#ask("POST", `/${encodeURIComponent(id)}/pin`, body, "application/json")).json();
  }

  async delete(id) {
    this.forget();
    await this.#ask("DELETE", `/${encodeURIComponent(id)}`);
  }

  forget() {
    this.#known = new WeakMap();
  }

  async retrying(request) {
    try {
      return await request();
    } catch (error) {
      if (error?.status !== 404 || error?.code !== "not_found") throw error;
      this.forget();
    }
    return request();
  }

  async #ask(method, path, body, type) {
    const { apiKey, maxRetries, fetch } = this.#options;
    const headers = {
      ...(apiKey === undefined ? {} : { authorization: `Bearer ${apiKey}` }),
      ...(type === undefined ? {} : { "content-type": type }),
    };
    for (let tries = 0; ; tries++) {
      let wait = Math.min(500 * 2 ** tries, 8000) * (1 - Math.random() / 4);
      try {
        const response = await fetch(this.#url + path, { method, headers, body });
        if (response.ok) return response;
        // The try before, whose answer was lost, has done it.
        if (method === "DELETE" && response.status === 404 && tries) return response;
        const after = response.headers.get("retry-after");
        if (/^\d+$/.test(after ?? "")) wait = Number(after) * 1000;
        const full = response.status === 429 || response.status === 503;
        if (!full || tries >= maxRetries || wait > MAX_WAIT_MS) throw await refusal(response);
        await response.body?.cancel();
      } catch (error) {
        if (error instanceof InlayError || tries >= maxRetries) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}
