// Embeddings of a server at argv[2], and transcriptions by one at argv[3] of the file argv[4]; what came is told as JSON.
import { createReadStream } from "node:fs";
import OpenAI, { toFile } from "openai";

const of = (url) => new OpenAI({ baseURL: url + "/v1", apiKey: "k", maxRetries: 0 });
const [embeds, hears] = process.argv.slice(2, 4).map(of);
const told = {};

const model = "m";
const input = ["a lantern", "a harbour"];
const plain = await embeds.embeddings.create({ model, input, encoding_format: "float" });
told.floats = plain.data.map((one) => one.embedding);
// The client asks for base64 by itself, and decodes it.
told.decoded = (await embeds.embeddings.create({ model, input })).data.map((one) => one.embedding);
told.usage = plain.usage;
const body = { model, input: input[0], encoding_format: "float" };
const line = JSON.stringify({ custom_id: "a", method: "POST", url: "/v1/embeddings", body }) + "\n";
const file = await embeds.files.create({ file: await toFile(Buffer.from(line), "a.jsonl"), purpose: "batch" });
const asked = { input_file_id: file.id, endpoint: "/v1/embeddings", completion_window: "24h" };
let batch = await embeds.batches.create(asked);
while (!(batch.completed_at || batch.failed_at)) {
  await new Promise((wake) => setTimeout(wake, 100));
  batch = await embeds.batches.retrieve(batch.id);
}
const output = JSON.parse(await (await embeds.files.content(batch.output_file_id)).text());
told.batched = output.response.body.data[0].embedding;

const sound = () => ({ file: createReadStream(process.argv[4]), model, temperature: 0 });
const heard = (more) => hears.audio.transcriptions.create({ ...sound(), ...more });
told.text = (await heard({})).text;
told.plain = await heard({ response_format: "text" });
told.subtitles = await heard({ response_format: "srt" });
const verbose = await heard({ response_format: "verbose_json" });
told.verbose = [verbose.text, verbose.duration, verbose.segments];
const events = [];
for await (const event of await heard({ stream: true })) events.push(event);
told.events = events.map((event) => event.type);
told.streamed = events.filter((event) => event.delta).map((event) => event.delta).join("");
told.done = events.at(-1).text;
told.english = typeof (await hears.audio.translations.create(sound())).text;
console.log(JSON.stringify(told));
