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

/** A tensor file as the server reads it: one tensor of shape (rows, hiddenSize). */
export function safetensors(rows: Rows, options?: FileOptions): Uint8Array;

/** Place of rows in a request: base64 of a file, or the id of a stored one. */
export type Source = { data: string } | { ref: string };

/** A part of a chat message's `content`. The `openai` package knows only OpenAI's own parts. */
export type EmbedsPart = { type: "prompt_embeds" } & Source;

/** Part of a message's `content`, of a tensor file or of the id of a stored one. */
export function chatPart(source: Uint8Array | string): EmbedsPart;

/** Fields of a completion beside `model`: its prompt is the rows. */
export function completionArgs(source: Uint8Array | string): {
  prompt: null;
  prompt_embeds: string | { ref: string };
};

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

/** Server's refusal, with the fields of OpenAI's error object. */
export class InlayError extends Error {
  status: number;
  code: string | null;
  param: string | null;
}

/** Sends files once and refers to them afterwards. */
export class Uploader {
  /** `baseURL` is that of the `openai` package: `http://host:8000/v1`. */
  constructor(baseURL: string, options?: UploaderOptions);
  /** The file itself if it is small, else its id on the server, uploaded unless it is there. */
  source(file: Uint8Array): Promise<Uint8Array | string>;
  /** Id of a file on the server. A file is known by the array that holds it. */
  ref(file: Uint8Array): Promise<string>;
  /** Stores a file; the same bytes again only start their time to live again. */
  upload(file: Uint8Array, options?: { model?: string }): Promise<StoredEmbeds>;
  get(id: string): Promise<StoredEmbeds>;
  pin(id: string, pinned?: boolean): Promise<StoredEmbeds>;
  delete(id: string): Promise<void>;
  /** Uploads every file again before it is referred to. */
  forget(): void;
  /**
   * Result of `request`; of a second try where the server no longer had what it refers to.
   * `request` makes its arguments with this uploader, so that the second try uploads again.
   */
  retrying<T>(request: () => Promise<T>): Promise<T>;
}
