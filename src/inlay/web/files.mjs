// Files that become chips: checked for size here, read by the server alone.

import { ApiError, ask } from "./api.mjs";
import { bytes, html, short, visible } from "./dom.mjs";

const PICTURES = [
  ["image/png", [0x89, 0x50, 0x4e, 0x47]],
  ["image/jpeg", [0xff, 0xd8, 0xff]],
  ["image/gif", [0x47, 0x49, 0x46, 0x38]],
  ["image/bmp", [0x42, 0x4d]],
];

// Only chooses the media type to send; the server decides by content what a file is.
async function pictureType(file) {
  const start = new Uint8Array(await file.slice(0, 12).arrayBuffer());
  const text = String.fromCharCode(...start);
  if (text.startsWith("RIFF") && text.endsWith("WEBP")) return "image/webp";
  return PICTURES.find(([, magic]) => magic.every((byte, index) => start[index] === byte))?.[0];
}

// Uploads a file; returns the chip's facts. Raises ApiError.
export async function upload(file, model, key, signal) {
  let type;
  try {
    type = await pictureType(file);
  } catch {
    throw new ApiError(400, `${file.name} cannot be read; is it a folder, or gone?`);
  }
  if (type && !model.capabilities.includes("images")) {
    throw new ApiError(400, `${model.id} takes no pictures: ${file.name} was not sent. A model `
      + "that takes them has \"images\" in /v1/models.");
  }
  const limit = type ? model.limits.max_body_bytes : model.limits.max_prompt_embeds_bytes;
  if (file.size > limit) {
    throw new ApiError(413, `${file.name} has ${bytes(file.size)}; this server takes `
      + `${bytes(limit)}${type ? "" : " (--max-prompt-embeds-bytes). Save fewer rows, or in a "
      + "smaller dtype"}. Nothing was sent.`);
  }
  const body = new Blob([file], { type: type ?? "application/octet-stream" });
  const stored = await ask(`v1/prompt_embeds?model=${encodeURIComponent(model.id)}`,
    { method: "POST", body, key, signal, headers: { "content-type": body.type } });
  return { ref: stored.id, name: file.name, stored, picture: Boolean(type),
    preview: type ? URL.createObjectURL(body) : null };
}

export const part = (chip) => (chip.picture
  ? { type: "image_url", ref: chip.ref } : { type: "prompt_embeds", ref: chip.ref });

export const size = (chip) => (chip.picture
  ? `${chip.stored.width} × ${chip.stored.height}`
  : `${chip.stored.num_tokens} × ${chip.stored.hidden_size} ${chip.stored.dtype}`);

export function rows(id, model, key, nearest) {
  return ask(`v1/prompt_embeds/${id}/rows`,
    { method: "POST", body: { model, nearest }, key });
}

// The rows of an upload: lengths as bars, and nearest tokens where the server shows them.
export function Rows({ facts }) {
  const most = Math.max(...facts.rows.map((row) => row.norm), facts.table_median_norm ?? 0);
  const near = facts.rows.some((row) => row.nearest?.length);
  const usual = facts.table_median_norm;
  const odd = usual ? facts.rows.filter((row) => row.norm > 4 * usual).length : 0;
  return html`<div class="rows">
    <p>${facts.num_tokens} rows of ${facts.hidden_size}, ${facts.dtype} as the model takes them.
      Median length ${short(facts.median_norm)}${usual
        ? `; the model's own tokens ${short(usual)}.` : "."}
      ${facts.num_tokens > facts.rows.length ? ` The first ${facts.rows.length} are shown.` : ""}
      ${odd ? ` ${odd} rows are over four times as long as a token's: out of range.` : ""}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Rows"><table>
      <thead><tr><th>row</th><th>length</th><th class="wide extra">
        <span class="hidden">bar</span></th><th class="extra">largest</th>
        ${near && html`<th>nearest tokens (cosine)</th>`}</tr></thead>
      <tbody>${facts.rows.map((row, index) => html`<tr>
        <td>${index}</td><td>${short(row.norm)}</td>
        <td class="extra"><meter max=${most || 1} value=${row.norm} aria-hidden="true"></meter></td>
        <td class="extra">${short(row.abs_max)}</td>
        ${near && html`<td class="near">${(row.nearest ?? []).map((token) => html`<span
          class=${token.exact ? "exact" : null}>${visible(token.text)}${" "}<small>${
          token.exact ? "exact" : token.cosine.toFixed(2)}</small></span>`)}</td>`}
      </tr>`)}</tbody></table></div>
    ${near ? html`<p class="hint">A row that equals a token's row stands for that token:
        whoever has the rows can read it.</p>`
      : html`<p class="hint">Nearest tokens are off here: they turn embeddings back into text.
        A server shows them with <code>--enable-embedding-lookup</code>, for your own uploads.</p>`}
  </div>`;
}
