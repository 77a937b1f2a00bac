// Every route that openai's package for Node has a method for, of a server at argv[2]; what came is told as JSON.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "k", maxRetries: 0 });
const model = "m";
const ask = { model, input: "count the lanterns", max_output_tokens: 8, temperature: 0 };
const messages = [{ role: "user", content: "count the lanterns" }];
const told = {};

const all = async (pages) => {
  const found = [];
  for await (const one of pages) found.push(one);
  return found;
};
const code = async (promise) => promise.then(() => null, (error) => [error.status, error.code]);
const until = async (get, done) => {
  let found = await get();
  while (!done(found)) {
    await new Promise((wake) => setTimeout(wake, 100));
    found = await get();
  }
  return found;
};

told.models = (await all(client.models.list())).map((one) => one.id);
const chat = { model, messages, max_tokens: 8, temperature: 0 };
told.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
told.chat_streamed = await client.chat.completions.stream(chat).finalContent();
const completion = { model, prompt: "count", max_tokens: 8, temperature: 0 };
told.completion = (await client.completions.create(completion)).choices[0].text;

const first = await client.responses.create(ask);
told.response = first.output_text;
told.streamed = (await client.responses.stream(ask).finalResponse()).output_text;
told.same = (await client.responses.retrieve(first.id)).output_text;
const second = await client.responses.create({ ...ask, input: "go on", previous_response_id: first.id });
const orders = {};
for (const order of ["asc", "desc"]) {
  const items = await all(client.responses.inputItems.list(second.id, { order, limit: 1 }));
  orders[order] = items.map((item) => item.content[0].text);
}
told.input_items = orders;
told.counted = (await client.responses.inputTokens.count({ model, input: ask.input })).input_tokens;
told.usage = first.usage.input_tokens;
const long = { ...ask, max_output_tokens: 60, background: true, seed: 5, temperature: 1 };
const made = await client.responses.create({ ...long, stream: true });
const events = await all(made);
const id = events[0].response.id;
told.numbers = events.map((event) => event.sequence_number);
const rest = await client.responses.retrieve(id, { stream: true, starting_after: 2 });
told.rest = (await all(rest)).map((event) => event.sequence_number);
const stopped = await client.responses.create(long);
told.cancelled = (await client.responses.cancel(stopped.id)).status;
await client.responses.delete(first.id);
told.deleted = await code(client.responses.retrieve(first.id));

const conversation = await client.conversations.create({ metadata: { a: "b" } });
await client.responses.create({ ...ask, conversation: conversation.id });
const kept = await all(client.conversations.items.list(conversation.id, { order: "asc", limit: 1 }));
told.conversation = kept.map((item) => item.content[0].text);
told.forgotten = (await client.conversations.delete(conversation.id)).deleted;

const line = (custom_id, body) =>
  JSON.stringify({ custom_id, method: "POST", url: "/v1/chat/completions", body }) + "\n";
const text = line("a", chat) + line("b", { ...chat, messages: [] });
const file = await client.files.create({ file: await toFile(Buffer.from(text), "a.jsonl"), purpose: "batch" });
told.files = (await all(client.files.list({ limit: 1 }))).map((one) => one.id === file.id);
const asked = { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" };
const begun = await client.batches.create(asked);
const batch = await until(() => client.batches.retrieve(begun.id), (one) => one.completed_at || one.failed_at);
told.batch = [batch.status, batch.request_counts, batch.errors?.data?.map((one) => one.line) ?? null];
const output = await (await client.files.content(batch.output_file_id)).text();
told.batch_text = JSON.parse(output).response.body.choices[0].message.content;
const failed = await (await client.files.content(batch.error_file_id)).text();
told.batch_error = JSON.parse(failed).response.status_code;
told.file_deleted = (await client.files.delete(file.id)).deleted;
told.batch_cancelled = (await client.batches.cancel(batch.id)).status;

const questions = [
  { type: "predicate", name: "urgent", instructions: "Is it urgent?" },
  { type: "choice", name: "team", instructions: "Which team?", choices: [{ value: "a" }, { value: true }] },
  { type: "score", instructions: "How upset?", levels: [{ label: "calm" }, { label: "angry" }] },
];
told.decisions = (await client.decisions.create({ model, input: "a lantern", questions })).answers.map((one) => [one.type, one.name]);
console.log(JSON.stringify(told));
