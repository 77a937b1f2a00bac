// The field where a prompt is written: text with chips of files anywhere in it.

import { ApiError, problemOf } from "./api.mjs";
import { html } from "./dom.mjs";
import { part, rows, size, upload } from "./files.mjs";

const MARK = /⟦(\d+)⟧/;

// Text with marks to parts: each mark stands for its chip; chips without one go first.
export function parts(text, chips) {
  if (!chips.length) return text;
  const pieces = text.split(MARK);
  const byNumber = new Map(chips.map((chip) => [String(chip.number), chip]));
  const used = new Set();
  const found = [];
  pieces.forEach((piece, index) => {
    if (index % 2 && byNumber.has(piece)) {
      used.add(piece);
      found.push(part(byNumber.get(piece)));
    } else if (piece) {
      found.push({ type: "text", text: index % 2 ? `⟦${piece}⟧` : piece });
    }
  });
  const first = chips.filter((chip) => !used.has(String(chip.number))).map(part);
  return [...first, ...found];
}

export function chipActions(app) {
  const { state, set } = app;
  const insert = (mark) => {
    const field = document.getElementById("draft");
    const at = field?.selectionStart ?? state.draft.length;
    set({ draft: state.draft.slice(0, at) + mark + state.draft.slice(at) });
  };
  return {
    async attach(files) {
      const model = state.models?.find((entry) => entry.id === state.settings.model);
      for (const file of files) {
        set({ uploading: file.name, problem: null });
        try {
          if (!model) throw new ApiError(404, "no model is chosen");
          const chip = await upload(file, model, state.settings.key);
          chip.number = state.nextChip;
          set({ chips: [...state.chips, chip], nextChip: state.nextChip + 1 });
          insert(`⟦${chip.number}⟧`);
        } catch (error) {
          app.failed(error);
        }
        set({ uploading: null });
      }
    },
    remove(chip) {
      if (chip.preview) URL.revokeObjectURL(chip.preview);
      set({ chips: state.chips.filter((other) => other !== chip),
        draft: state.draft.replace(`⟦${chip.number}⟧`, ""),
        inspected: state.inspected?.chip === chip ? null : state.inspected });
    },
    async inspect(chip) {
      if (state.inspected?.chip === chip) {
        set({ inspected: null });
        return;
      }
      set({ inspected: { chip } });
      try {
        const facts = await rows(chip.ref, state.settings.model, state.settings.key,
          app.lookup() ? 3 : 0);
        if (state.inspected?.chip === chip) set({ inspected: { chip, facts } });
      } catch (error) {
        if (state.inspected?.chip === chip) set({ inspected: { chip, problem: problemOf(error) } });
      }
    },
  };
}

export function Chip({ chip, actions, open }) {
  return html`<span class="chip">
    ${chip.preview && html`<img src=${chip.preview} alt="" width="20" height="20" />`}
    <span class="mark">⟦${chip.number}⟧</span> ${chip.name} <small>${size(chip)}</small>
    ${actions && !chip.picture && html`<button type="button" class="quiet"
      aria-expanded=${String(open)}
      onClick=${() => actions.inspect(chip)}>Rows</button>`}
    ${actions && html`<button type="button" class="quiet"
      aria-label=${`Remove ${chip.name}`}
      onClick=${() => actions.remove(chip)}>✕</button>`}
  </span>`;
}

export function Composer({ app, label, send, running, stop, hint }) {
  const { state, set, actions } = app;
  const keys = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) send();
  };
  return html`<form class="composer" onSubmit=${(event) => {
    event.preventDefault();
    if (!running) send();
  }}>
    ${state.chips.length > 0 && html`<div class="chips">${state.chips.map((chip) => html`
      <${Chip} key=${chip.number} chip=${chip} actions=${actions}
        open=${state.inspected?.chip === chip} />`)}</div>`}
    <label for="draft">${label}</label>
    <textarea id="draft" rows="3" value=${state.draft} onKeyDown=${keys}
      onInput=${(event) => set({ draft: event.target.value })}
      aria-describedby="draft-hint"></textarea>
    <p id="draft-hint" class="hint">${hint ?? `Enter sends, Shift+Enter breaks the line. Drop a
      file of embeddings or a picture: its ⟦mark⟧ stands where it goes.`}</p>
    <div class="row">
      ${running ? html`<button type="button" class="main" onClick=${stop}>Stop</button>`
        : html`<button class="main" disabled=${!state.draft.trim() && !state.chips.length}>
          Send</button>`}
      <label class="button">Attach file<input type="file" multiple class="hidden" onChange=${
        (event) => {
          actions.attach([...event.target.files]);
          event.target.value = "";
        }} /></label>
      ${state.uploading && html`<span role="status">Uploading ${state.uploading} …</span>`}
    </div>
  </form>`;
}
