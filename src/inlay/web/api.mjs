// Requests to the server this page came from, and errors with what to do about them.

// Relative to the page, so that a proxy may serve it under a prefix.
const base = new URL("./", document.baseURI);

export const address = (path) => new URL(path, base).href;

export class ApiError extends Error {
  constructor(status, said, retryAfter) {
    super(said);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const ADVICE = {
  0: ["The server does not answer.",
    "Is it still running, and is the network up? What you typed is kept here.", true],
  400: ["The server refuses this request.", "Change what it names, then send it again.", false],
  401: ["An API key is needed.", "Type one that this server knows into Settings, API key.", true],
  403: ["This is not allowed.", "The server says below which flag or key it takes.", false],
  404: ["It is not there any more.",
    "A model may have been stopped, or an upload has expired: choose a model from the list, "
    + "or attach the file again.", true],
  413: ["This is too large.", "Send less, or raise the limit that is named below.", false],
  415: ["The server does not read this kind of file.",
    "Save embeddings as safetensors, .npy or with torch.save.", false],
  429: ["Too many requests from you.", "Wait a moment, then try again.", true],
  503: ["The server is full, starting, asleep or draining.",
    "Wait a moment, then try again.", true],
  504: ["The request ran out of time.", "Ask for fewer tokens, or try again.", true],
};

// What a person is told of an error: {title, advice, said, again}.
export function problemOf(error) {
  if (!(error instanceof ApiError)) {
    return { title: "This page failed.", advice: "Reload it, and report what it says here.",
      said: String(error), again: true };
  }
  const known = ADVICE[error.status]
    ?? ["The server failed.", "Its log says why. Try again.", true];
  const wait = error.retryAfter ? ` The server asks for ${error.retryAfter} s.` : "";
  return { title: known[0], advice: known[1] + wait, said: error.message, again: known[2],
    status: error.status };
}

async function send(path, { method = "GET", body, key, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (key) all.authorization = `Bearer ${key}`;
  let payload = body;
  if (body !== undefined && !(body instanceof Blob)) {
    all["content-type"] = "application/json";
    payload = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(address(path),
      { method, headers: all, body: payload, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "");
  }
  if (!answer.ok && answer.status !== 207) {
    let said = `status ${answer.status}`;
    try {
      said = (await answer.json()).error.message;
    } catch { /* A proxy's answer is not JSON: its status says it all. */ }
    throw new ApiError(answer.status, said, Number(answer.headers.get("retry-after")) || null);
  }
  return answer;
}

// The answer's JSON, or its text where it is words.
export async function ask(path, options) {
  const answer = await send(path, options);
  const words = answer.headers.get("content-type")?.startsWith("text/");
  try {
    return await (words ? answer.text() : answer.json());
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the answer was cut short");
  }
}

// The events of a stream: calls `take(event)` for each, `comment(text)` for each comment.
export async function stream(path, options, take, comment = () => {}) {
  const answer = await send(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let done = false;
  try {
    while (!done) {
      const piece = await reader.read();
      if (piece.done) throw new ApiError(0, "the answer was cut short");
      const lines = (rest + piece.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith(":")) comment(line.slice(1).trim());
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") {
          done = true;
          break;
        }
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new ApiError(event.error.code || 503, event.error.message);
        take(event);
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "the answer was cut short");
  } finally {
    reader.cancel().catch(() => {});
  }
}
