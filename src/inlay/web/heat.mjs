// Answers with their logprobs as heat, and the positions of a prompt with what was cached.

import { html, millis, visible } from "./dom.mjs";

// 0 for certain, 4 for improbable; the style sheet has a colour and a mark for each.
export function level(logprob) {
  const share = Math.exp(logprob ?? 0);
  return share > 0.9 ? 0 : share > 0.6 ? 1 : share > 0.3 ? 2 : share > 0.1 ? 3 : 4;
}

// End and role tokens are part of the answer's tokens, and not of its text.
const SPECIAL = /^(<\|.*\|>|<\/?[a-z_]+>|\[[A-Z_]+\])$/;

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100%" : share >= 0.1 ? `${share.toFixed(1)}%` : "<0.1%";
};

// Tokens of an answer. One of them is chosen, by the mouse or with the arrow keys.
export function Heat({ answer, choose, hint = true }) {
  const { tokens, chosen = null } = answer;
  const move = (event) => {
    // Keys may come faster than frames: what was drawn may be behind what is chosen.
    const now = answer.chosen ?? null;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") choose(null);
    if (!step) return;
    event.preventDefault();
    choose(Math.min(tokens.length - 1, Math.max(0, (now ?? -step + (step < 0)) + step)));
  };
  const token = chosen === null ? null : tokens[chosen];
  return html`<div class="heat">
    <div class="tokens" tabindex="0" role="group" onKeyDown=${move}
      aria-label="Answer by token; arrow keys show the alternatives of each">
      ${tokens.map((entry, index) => html`<span
        class=${SPECIAL.test(entry.text) ? "token special" : "token"}
        data-level=${level(entry.logprob)} data-chosen=${index === chosen ? "" : null}
        data-differs=${index === answer.differs ? "" : null}
        onMouseEnter=${() => choose(index)}>${entry.text}</span>`)}
    </div>
    <div class="alternatives" aria-live="polite">
      ${token ? html`<p>Token ${chosen + 1}: <b>${visible(token.text)}</b></p>
        <ol>${token.others.map(([text, logprob]) => html`<li
          data-taken=${text === token.text ? "" : null}>
          <span class="name">${visible(text)}</span>
          <progress max="1" value=${Math.exp(logprob)} aria-hidden="true"></progress>
          <span>${percent(logprob)}</span></li>`)}</ol>`
      : hint && html`<p class="hint">Point at a token, or use the arrow keys, to see what else it
        might have been. The warmer its colour, the less sure the model was.</p>`}
    </div>
  </div>`;
}

const SHOWN = 400;

// The prompt by position, those that the prefix cache had marked; `names` where it is all text.
export function Positions({ usage, names }) {
  if (!usage) return null;
  const total = usage.prompt_tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const cells = Array.from({ length: Math.min(total, SHOWN) }, (_, index) => html`<span
    class=${names ? "cell named" : "cell"} data-cached=${index < cached ? "" : null}>${
    names ? visible(names[index] ?? "") : ""}</span>`);
  return html`<details class="positions">
    <summary>Prompt: ${total} positions, <b class=${cached ? "cached" : null}>${
      cached} cached</b></summary>
    <div class="cells" role="img" aria-label=${`${cached} of ${total} positions came from the `
      + "prefix cache"}>${cells}${total > SHOWN ? ` and ${total - SHOWN} more` : ""}</div>
    <p class="hint">Underlined green positions were found in the prefix cache and not computed
      again. It keeps whole blocks of them, and the last position is always computed.${cached ? ""
      : " Send the same again to see it at work."}</p>
  </details>`;
}

export function Figures({ answer }) {
  const count = answer.usage?.completion_tokens ?? answer.ids.length;
  const after = answer.took - answer.first;
  // Of a few tokens that came together a rate says nothing.
  const rate = after > 100 && count > 8
    ? `, ${Math.round(1000 * (count - 1) / after)} a second` : "";
  return html`<p class="figures">first token ${millis(answer.first)} · ${count} tokens in
    ${" "}${millis(answer.took)}${rate}${answer.finish === "length"
      ? " · cut at max tokens" : ""}${answer.stopped ? " · stopped" : ""}</p>`;
}
