// llama.cpp as a worker, through node-llama-cpp's prebuilt binary:
// node llama_cpp.mjs FOLDER_OF_NODE_MODULES TARGET.gguf DRAFT.gguf CACHE_TYPE THREADS BATCH
import { createRequire } from "node:module";
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const [modules, target, draft, cacheType, threads, batch] = process.argv.slice(2);
const entry = createRequire(`${modules}/`).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));

const llama = await getLlama({
  gpu: false,
  build: "never",
  maxThreads: +threads,
  logLevel: LlamaLogLevel.error,
  progressLogs: false,
});
const load = (modelPath) => llama.loadModel({ modelPath });
const options = {
  contextSize: 1024,
  batchSize: 512,
  threads: +threads,
  flashAttention: cacheType !== "F32", // it computes in F16
  experimentalKvCacheKeyType: cacheType,
  experimentalKvCacheValueType: cacheType,
};
const targetModel = await load(target);
const wide = await targetModel.createContext({ ...options, sequences: +batch });
const sequences = Array.from({ length: +batch }, () => wide.getSequence());
const [targetSequence, draftSequence] = await Promise.all(
  [targetModel, await load(draft)].map(async (model) => (await model.createContext(options)).getSequence()),
);

async function plain(sequence, prompt, maxTokens) {
  await sequence.clearHistory();
  const tokens = [];
  for await (const token of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
    tokens.push(token);
    if (tokens.length === maxTokens) break;
  }
  return tokens;
}

// The greedy next tokens after each of the last `outputs` of these tokens.
async function best(sequence, tokens, outputs) {
  const request = { generateNext: { token: true, options: { temperature: 0 } } };
  const first = tokens.length - outputs;
  const results = await sequence.controlledEvaluate(tokens.map((token, i) => (i < first ? token : [token, request])));
  return results.slice(first).map((result) => result.next.token);
}

async function truncate(sequence, length) {
  const end = sequence.nextTokenIndex;
  if (end > length) await sequence.eraseContextTokenRanges([{ start: length, end }]);
}

// k drafts a round. The library's own DraftSequenceTokenPredictor drafts out of step with the text: the target refuses
// drafts of a draft model that agrees with it.
async function speculative(k, prompt, maxTokens) {
  await targetSequence.clearHistory();
  await draftSequence.clearHistory();
  const tokens = [...prompt, ...(await best(targetSequence, prompt, 1))];
  while (tokens.length < prompt.length + maxTokens) {
    const drafts = await best(draftSequence, tokens.slice(draftSequence.nextTokenIndex), 1);
    while (drafts.length < k) drafts.push(...(await best(draftSequence, drafts.slice(-1), 1)));
    const targets = await best(targetSequence, [tokens.at(-1), ...drafts], k + 1);
    let accepted = 0;
    while (accepted < k && targets[accepted] === drafts[accepted]) accepted++;
    tokens.push(...targets.slice(0, accepted + 1));
    await truncate(targetSequence, tokens.length - 1);
    await truncate(draftSequence, tokens.length - 1);
  }
  return tokens.slice(prompt.length, prompt.length + maxTokens);
}

function run({ prompts, max_tokens: maxTokens, k }) {
  if (k) return Promise.all(prompts.map((prompt) => speculative(k, prompt, maxTokens)));
  return Promise.all(prompts.map((prompt, i) => plain(sequences[i], prompt, maxTokens)));
}

console.log("@@{}");
for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  const start = performance.now();
  const tokens = await run(request);
  console.log("@@" + JSON.stringify({ seconds: (performance.now() - start) / 1000, tokens }));
}
process.exit(0);
