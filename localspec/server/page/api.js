/* The server's API: an answer as a stream of rounds, and what the server is. */

let key = "";
let model = null; // the one that answers, of a server that has several

export function useKey(value) {
  key = value;
}

export function chooseModel(name) {
  model = name;
}

/* status 0: the server does not answer; 401: a key is needed; 429: too many are waiting. code: the server's word for it. */
export class ApiError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function request(path, options = {}) {
  const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
  let response;
  try {
    response = await fetch(path, {...options, headers, cache: "no-store"});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`, code = "";
  try {
    const {error} = await response.json();
    ({message, code} = typeof error === "string" ? {message: error, code: ""} : error); // Ollama's form is the text alone
  } catch {
    // Not JSON, or not the server's: the status says it.
  }
  throw new ApiError(message, response.status, code);
}

export async function serverStats() {
  return (await request(`/v1/localspec/stats${model === null ? "" : `?model=${encodeURIComponent(model)}`}`)).json();
}

export const models = async () => (await request("/v1/localspec/models")).json();
export const loadModel = (name) => send("POST", "/models/load", {model: name});
export const unloadModel = (name) => send("POST", "/models/unload", {model: name});

/* Fetches a model. Yields what Ollama's API tells: {status, total, completed}. Aborting the signal stops it. */
export async function* pull(name, signal) {
  const response = await send("POST", "/api/pull", {model: name}, signal);
  for await (const line of lines(response.body)) {
    const step = JSON.parse(line);
    if (step.error) throw new ApiError(step.error);
    yield step;
  }
}

async function send(method, path, body = null, signal = undefined) {
  const options = body ? {headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)} : {};
  return request(path, {method, signal, ...options});
}

/* {text} of a PDF or Word document, in Base64. */
export async function textOf(name, data) {
  return (await send("POST", "/v1/localspec/text", {name, data})).json();
}

const KEPT = "/v1/localspec/conversations";

/* What the server keeps. The content of a conversation: title, system, settings, messages; a new one has its id already. */
export const conversations = {
  list: async (query) => (await request(`${KEPT}?q=${encodeURIComponent(query)}`)).json(),
  get: async (id) => (await request(`${KEPT}/${encodeURIComponent(id)}`)).json(),
  create: async (content) => (await send("POST", KEPT, content)).json(),
  replace: async ({id, revision}, content) => (await send("PUT", `${KEPT}/${id}`, {...content, revision})).json(),
  delete: async (id) => send("DELETE", `${KEPT}/${id}`),
  export: async (id, format) => (await request(`${KEPT}/${id}?format=${format}`)).blob(),
};

/* Answers messages. Yields {loading} (how far the model is loaded), {prompt} (how far a long one is read), {round}, {reasoning}, {text}, {finish} and {stats, explanation}, as they come.

   settings: speculate, draftLength ("auto" or a number), think ("on" or "off"), temperature, topP, topK, minP,
   repeatPenalty, seed, maxTokens, prediction (a text that the answer is likely to repeat), resumed (the last message is the
   beginning of the answer); undefined leaves it to the server.
   Aborting the signal stops the engine within a round. */
export async function* answer(messages, settings, signal) {
  const body = {
    ...(model === null ? {} : {model}),
    messages,
    stream: true,
    stream_options: {include_usage: true, localspec_rounds: true},
    think: settings.think,
    temperature: settings.temperature,
    max_tokens: settings.maxTokens,
    top_p: settings.topP,
    top_k: settings.topK,
    min_p: settings.minP,
    repeat_penalty: settings.repeatPenalty,
    seed: settings.seed,
    prediction: settings.prediction && {type: "content", content: settings.prediction},
    ...(settings.resumed ? {continue_final_message: true, add_generation_prompt: false} : {}),
    localspec: settings.speculate ? {draft_length: settings.draftLength} : {off: true},
  };
  document.dispatchEvent(new Event("asked"));
  const response = await send("POST", "/v1/chat/completions", body, signal)
    .finally(() => document.dispatchEvent(new Event("answered"))); // it is being answered, or was refused
  let complete = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 500, chunk.error.code);
    if (chunk.localspec?.loading) yield {loading: chunk.localspec.loading};
    if (chunk.localspec?.prompt) yield {prompt: chunk.localspec.prompt};
    if (chunk.localspec?.round) yield {round: chunk.localspec.round};
    if (chunk.localspec?.stats) yield chunk.localspec;
    for (const choice of chunk.choices || []) {
      if (choice.delta?.reasoning_content) yield {reasoning: choice.delta.reasoning_content};
      if (choice.delta?.content) yield {text: choice.delta.content};
      if (choice.finish_reason) yield {finish: choice.finish_reason};
    }
  }
  if (!complete) throw new ApiError("The connection broke off before the answer was complete.");
}

/* The data of server-sent events. */
async function* events(stream) {
  for await (const line of lines(stream)) {
    if (line.startsWith("data:")) yield line.slice(5).trim(); // each of ours is one line of JSON
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield* lines.filter(Boolean);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke off before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
