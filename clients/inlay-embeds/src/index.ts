/** Prompt embeddings for the `openai` package; README.md has examples. */

/** Elements of a tensor file: float32 as it is, or rounded to bfloat16, which halves the bytes. */
export type DType = "F32" | "BF16";

/** Rows of embeddings, one after the other; a row has `hiddenSize` elements. */
export interface Rows {
  data: Float32Array;
  hiddenSize: number;
}

export interface FileOptions {
  /** "F32" unless given. */
  dtype?: DType;
  /** Id of the embedding table the rows were made with; servers refuse rows of another one. */
  tableId?: string;
}

/** Place of rows in a request: base64 of a file, or the id of a stored one. */
export type Source = { data: string } | { ref: string };

/** A part of a chat message's `content`. The `openai` package knows only OpenAI's own parts. */
export type EmbedsPart = { type: "prompt_embeds" } & Source;

/** Fields of a completion beside `model`: its prompt is the rows. */
export interface CompletionArgs {
  prompt: null;
  prompt_embeds: string | { ref: string };
}

/** A stored prompt, as the server describes it. */
export interface StoredEmbeds {
  id: string;
  object: "prompt_embeds";
  num_tokens: number;
  hidden_size: number;
  dtype: string;
  bytes: number;
  expires_at: number | null;
  pinned: boolean;
  num_prompts: number;
}

export interface UploaderOptions {
  apiKey?: string;
  /** Bytes of a file from which on `source` uploads it; 65536 unless given. */
  uploadFrom?: number;
  /** Further tries where the server is full (429, 503) or cannot be reached; 2 unless given. */
  maxRetries?: number;
  fetch?: typeof fetch;
}

const MAX_WAIT_MS = 60_000;

/** Least bytes of a file that servers accept. */
const MIN_BYTES = 100;

/** Rounds to the nearest bfloat16, halves to even; NaN stays NaN. */
function bfloat16(data: Float32Array): Uint16Array {
  const bits = new Uint32Array(data.buffer, data.byteOffset, data.length);
  return Uint16Array.from(bits, (value) =>
    (value & 0x7fffffff) > 0x7f800000
      ? (value >>> 16) | 0x40
      : (value + 0x7fff + ((value >>> 16) & 1)) >>> 16,
  );
}

/** A tensor file as the server reads it: one tensor of shape (rows, hiddenSize). */
export function safetensors(
  { data, hiddenSize }: Rows,
  { dtype = "F32", tableId }: FileOptions = {},
): Uint8Array {
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
function base64(bytes: Uint8Array): string {
  let text = "";
  for (let start = 0; start < bytes.length; start += 0x8000)
    text += String.fromCharCode(...bytes.subarray(start, start + 0x8000));
  return btoa(text);
}

/** Part of a message's `content`, of a tensor file or of the id of a stored one. */
export function chatPart(source: Uint8Array | string): EmbedsPart {
  const place = typeof source === "string" ? { ref: source } : { data: base64(source) };
  return { type: "prompt_embeds", ...place };
}

/** Fields of a completion beside `model`, of a tensor file or of the id of a stored one. */
export function completionArgs(source: Uint8Array | string): CompletionArgs {
  return { prompt: null, prompt_embeds: typeof source === "string" ? { ref: source } : base64(source) };
}

/** Server's refusal, with the fields of OpenAI's error object. */
export class InlayError extends Error {
  readonly status: number;
  readonly code: string | null;
  readonly param: string | null;

  constructor(
    status: number,
    message: string,
    { code = null, param = null }: { code?: string | null; param?: string | null } = {},
  ) {
    super(message);
    this.name = "InlayError";
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

async function refusal(response: Response): Promise<InlayError> {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new InlayError(response.status, error.message, error);
  } catch {
    return new InlayError(response.status, `the server answered ${response.status}: ${text.slice(0, 200)}`);
  }
}

/** Sends files once and refers to them afterwards. */
export class Uploader {
  readonly #url: string;
  readonly #options: { apiKey?: string; uploadFrom: number; maxRetries: number; fetch: typeof fetch };
  #known = new WeakMap<Uint8Array, Promise<string>>();

  /** `baseURL` is that of the `openai` package: `http://host:8000/v1`. */
  constructor(
    baseURL: string,
    { apiKey, uploadFrom = 65536, maxRetries = 2, fetch = globalThis.fetch }: UploaderOptions = {},
  ) {
    this.#url = new URL(baseURL).href.replace(/\/+$/, "") + "/prompt_embeds";
    this.#options = { apiKey, uploadFrom, maxRetries, fetch };
  }

  /** The file itself if it is small, else its id on the server, uploaded unless it is there. */
  async source(file: Uint8Array): Promise<Uint8Array | string> {
    return file.length < this.#options.uploadFrom ? file : this.ref(file);
  }

  /** Id of a file on the server. A file is known by the array that holds it. */
  async ref(file: Uint8Array): Promise<string> {
    let known = this.#known.get(file);
    if (known === undefined) {
      known = this.upload(file).then(({ id }) => id);
      // Several requests at once upload once; one that failed is not kept.
      known.catch(() => this.#known.delete(file));
      this.#known.set(file, known);
    }
    return known;
  }

  /** Stores a file; the same bytes again only start their time to live again. */
  async upload(file: Uint8Array, { model }: { model?: string } = {}): Promise<StoredEmbeds> {
    const query = model === undefined ? "" : `?model=${encodeURIComponent(model)}`;
    return (await this.#ask("POST", query, file, "application/octet-stream")).json();
  }

  async get(id: string): Promise<StoredEmbeds> {
    return (await this.#ask("GET", `/${encodeURIComponent(id)}`)).json();
  }

  async pin(id: string, pinned = true): Promise<StoredEmbeds> {
    const body = JSON.stringify({ pinned });
    return (await this.#ask("POST", `/${encodeURIComponent(id)}/pin`, body, "application/json")).json();
  }

  async delete(id: string): Promise<void> {
    this.forget();
    await this.#ask("DELETE", `/${encodeURIComponent(id)}`);
  }

  /** Uploads every file again before it is referred to. */
  forget(): void {
    this.#known = new WeakMap();
  }

  /**
   * Result of `request`; of a second try where the server no longer had what it refers to.
   * `request` makes its arguments with this uploader, so that the second try uploads again.
   */
  async retrying<T>(request: () => Promise<T>): Promise<T> {
    try {
      return await request();
    } catch (error) {
      const { status, code } = (error ?? {}) as { status?: unknown; code?: unknown };
      if (status !== 404 || code !== "not_found") throw error;
      this.forget();
    }
    return request();
  }

  async #ask(
    method: string,
    path: string,
    body?: Uint8Array | string,
    type?: string,
  ): Promise<Response> {
    const { apiKey, maxRetries, fetch } = this.#options;
    const headers = {
      ...(apiKey === undefined ? {} : { authorization: `Bearer ${apiKey}` }),
      ...(type === undefined ? {} : { "content-type": type }),
    };
    for (let tries = 0; ; tries++) {
      let wait = Math.min(500 * 2 ** tries, 8000) * (1 - Math.random() / 4);
      try {
        const response = await fetch(this.#url + path, { method, headers, body: body as BodyInit });
        if (response.ok) return response;
        // The try before, whose answer was lost, has done it.
        if (method === "DELETE" && response.status === 404 && tries) return response;
        const after = response.headers.get("retry-after") ?? "";
        if (/^\d+$/.test(after)) wait = Number(after) * 1000;
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
