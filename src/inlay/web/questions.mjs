// Questions that the bundled demos know an answer to, to click.

import { html } from "./dom.mjs";

const PICTURES = {
  "red-4":
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAACDklEQVR42nWSS0sjURCF6z67TdPmZRqiESMSGiQi"
    + "7tz6b/0L/gFBcOeLuDEQSWKnQ5tMWpO+t27NYoxxBqZWtfnqcM4pRkQAAAAuzzFJljc3vy4vXZ6XLi7883Ov2xVR"
    + "BD9GbtaicFnmZjMA4KUSr1SY77vFghDJGKaUqFaZ728Al+em3zeDAQCInR11cCCqVTse/7nCKxXv7Ew2mxIAAJGM"
    + "wTQtej0cjUSjodptHgRuPi8eH3EyASEU52AtAHAAIGMwy8xgsLq/xzTVx8f65MR9fq7u7pbX18XTE1NKRBHzvDWw"
    + "WuF0iqMRvr2RMXJvTzQadjQqnp8xTckY5vs8CEDKL9O0WmGS4GQCzrGtLR6GYK3p9Wy/z+t12WzyIPi2ulZIU3x/"
    + "B86ZEG4+t8OheXkxr6/08QFEVBRUFODcWsEYN5u5xYJpTdYWvR4tl3Y4xCSh5ZIQeRi6Vous/bsHIkKkLCseHgiR"
    + "ioKHoahWRa0m6nW+vc2U+gKYUrxc5qUS5bkdj22S8CDg5bJstXQc6zhWnY5sNnkYroFSSbZaqtPBLCNEHI+JcxnH"
    + "XrfrnZ6qoyMRRd++JQDwMNRxLCoVtb+/vL3Nr66ASLXbOo7V4eF3AxuAaS3qdeZ5TGucTnkQkDEiiuTurqjVfmb6"
    + "Fev6mRwZQ8aAc0xKFgRsXdZ/ACJCBEQgAs6Z1kxr4Pwf4DeDriCBM0/PugAAAABJRU5ErkJggg==",
  "green-8":
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAACU0lEQVR42lWRy09TQRjFv5m5z97S3kufUhSrViHG"
    + "oIa40bjQlTv/bg0GAwYJCaQtbaGP+37O3Jlx0QZ19y3OL+ec7yApJQAAwDS9PV78PFmenXkX1+Fwni11og/qT953"
    + "333tfzmwB2uZAgBcciaYXwQ3ycwt/Jpa7df2GobDpSAIp2WalzkVTEEEI6wAABPMK4KrcPRt/sPN/TfNV0eVDgDc"
    + "ZfNT93yZuz4NEpZaakVbAzmn82w5S29XuYcAPaz29u1nAKAF6ql7HrE4LXMmmJRiEykrs5tktiq8huE4uv14a7dt"
    + "NgMaCSkpZwjwWvq3w+ZCiqVUCCKLbEUFW2buJJlqRG0YjqVWVKwihDeAqZi71oOgCMbJdBRP5tmCidIvAoJJx2wf"
    + "OM+7ZttSKwoiG8AgWttsulbHDmrjeDKMxl7hp2W+t9U7ar0+sAfbhqNhdR0EA4CKVUevd812z+o6ul1KnpY5Rmhb"
    + "d/btwQv76ZZa/a8DRljFKkak4AwA2mZTxxoVrKJUKKcJS22t/h8gpGCCuYV34V96hX/YeKkiZRTfUMG+L05ynn/u"
    + "faxpW/8uLbKy8GkwS+9ilnTMVtPYxgiP4slVOMQIvW0dcskxwggQBgAueFKmEU2yMqeCSSl0orXMRk2rhjS8TRcR"
    + "jZlg4n44hIAgXFWt3eqOm3s+DWUsAxr5RRCxOC3TnOeUM4IUgkC5/9Kg3v+08+HcvxzH0+NsGdIwYnFSpgpWSsGZ"
    + "YIbUNw4EEUJIw3D6tUerwvvl/r6OhgGNuCh1omNAEgSXQoIEgD8a3lnSik5IxAAAAABJRU5ErkJggg==",
};

const TEXT = ["What tool does Gola use?", "What is the capital of Wundor?",
  "What pet does Koso have?", "Reverse: i t k r", "What is 8 minus 7?"];

const WRITTEN = ["Komi lives in", "Dovel has a pet", "Bremin always carries a",
  "Q: What is the favourite colour of Sili?\nA:", "Q: Where does Stisel work?\nA:"];

const DRAWN = ["Draw the digit nine in the colour of ink.",
  "Paint the digit four, please, as blood is coloured.",
  "Paint nine minus one, please, as lavender is coloured.",
  "Draw zero plus zero in the colour of a frog.",
  "What is zero plus three, in the colour of a sapphire?"];

const SEEN = [["red-4", "What digit is it?"], ["red-4", "What colour is it?"],
  ["red-4", "Is it even?"], ["green-8", "What digit is it?"], ["green-8", "What colour is it?"]];

const texts = (list) => list.map((text) => ({ text }));

// Of the chosen model, for a view: [{text, picture}]; none where it is no demo.
export function questionsOf(model, tab) {
  if (model?.id !== "inlay-demo") return [];
  if (model.capabilities.includes("image_output")) return tab === "chat" ? texts(DRAWN) : [];
  if (model.capabilities.includes("images")) {
    return tab === "chat" ? SEEN.map(([picture, text]) => ({ text, picture })) : [];
  }
  return texts(tab === "complete" ? WRITTEN : TEXT);
}

// The picture of a question as a file, as if it had been chosen.
export function pictureOf({ picture }) {
  const data = Uint8Array.from(atob(PICTURES[picture]), (letter) => letter.charCodeAt(0));
  return new File([data], `${picture}.png`, { type: "image/png" });
}

export function Questions({ app, ask }) {
  const { state } = app;
  const known = questionsOf(app.model(), state.tab);
  if (!known.length) return null;
  return html`<div class="questions" role="group" aria-label="Questions to try">
    <span class="hint">Try:</span>${known.map((one) => html`
      <button type="button" disabled=${Boolean(state.running || state.uploading)}
        onClick=${() => ask(one)}>${one.picture && `${one.picture}: `}${one.text}</button>`)}
  </div>`;
}
