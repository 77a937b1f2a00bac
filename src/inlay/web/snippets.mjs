// A request as curl, Python or JavaScript. A key is never part of it.

import { Component } from "./preact.mjs";
import { address } from "./api.mjs";
import { html } from "./dom.mjs";

const quoted = (text) => `'${text.replace(/'/g, "'\\''")}'`;
const INDENTED = (value) => JSON.stringify(value, null, 2);

function curl(url, body, withKey) {
  const key = withKey ? "  -H \"Authorization: Bearer $INLAY_KEY\" \\\n" : "";
  return `curl ${url} -H 'Content-Type: application/json' \\\n${key}  -d ${
    quoted(JSON.stringify(body))}\n`;
}

function python(url, body, withKey) {
  const header = withKey
    ? ",\n    headers={\"Authorization\": \"Bearer \" + os.environ[\"INLAY_KEY\"]}" : "";
  // A Python string without its own escapes: what JSON escapes stays JSON's.
  const text = JSON.stringify(JSON.stringify(body));
  return `import json${withKey ? "\nimport os" : ""}\n\nimport httpx\n\nbody = json.loads(${text})
answer = httpx.post(
    "${url}", json=body, timeout=300${header}
).raise_for_status().json()
print(answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"])\n`;
}

function javascript(url, body, withKey) {
  const key = withKey ? "\n    Authorization: `Bearer ${process.env.INLAY_KEY}`," : "";
  return `const answer = await fetch("${url}", {
  method: "POST",
  headers: {
    "Content-Type": "application/json",${key}
  },
  body: JSON.stringify(${INDENTED(body).replace(/\n/g, "\n  ")}),
});
if (!answer.ok) throw new Error(await answer.text());
const { choices } = await answer.json();
console.log(choices[0].text ?? choices[0].message.content);\n`;
}

const LANGUAGES = { curl, Python: python, JavaScript: javascript };

export class Snippets extends Component {
  constructor() {
    super();
    this.state = { language: null, copied: false };
  }

  text(language) {
    const { request, withKey } = this.props;
    return LANGUAGES[language](address(request.path), request.body, withKey);
  }

  async copy(language) {
    let copied = true;
    try {
      await navigator.clipboard.writeText(this.text(language));
    } catch {
      // Pages over plain HTTP may not write the clipboard; the text is shown to be selected.
      copied = false;
    }
    this.setState({ language, copied });
  }

  render() {
    const { language, copied } = this.state;
    return html`<div class="snippets">
      <span class="row"><span>Copy as</span>${Object.keys(LANGUAGES).map((name) => html`
        <button type="button" class="quiet" aria-pressed=${String(name === language)}
          onClick=${() => this.copy(name)}>${name}</button>`)}
        <span role="status">${language && (copied ? "Copied." : "Select and copy it.")}</span>
        ${language && html`<button type="button" class="quiet" aria-label="Close the snippet"
          onClick=${() => this.setState({ language: null })}>✕</button>`}</span>
      ${language && html`<pre tabindex="0" aria-label=${`Request as ${language}`}><code>${
        this.text(language)}</code></pre>`}
    </div>`;
  }
}
