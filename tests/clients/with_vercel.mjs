// Vercel's AI SDK: OpenAI's responses (its default) and chat, any OpenAI-compatible server, Anthropic's messages.
// node with_vercel.mjs URL MODEL, run in a folder that holds its node_modules; ends with 0 if all was answered.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const require = createRequire(pathToFileURL(process.cwd() + '/'));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, tool, Output, stepCountIs } = await load('ai');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { createAnthropic } = await load('@ai-sdk/anthropic');
const { z } = await load('zod');

const [url, name] = process.argv.slice(2);
const TEXT = 'The weather is fine.';

// The model says nonsense, and other nonsense on another CPU: where no schema and no call that must be made holds what
// it says, a grammar does.
const holding = (where, init) => {
  const body = JSON.parse(init.body);
  const choice = body.tool_choice?.type ?? body.tool_choice ?? 'auto';
  const schema = body.response_format ?? body.text?.format ?? body.output_config?.format;
  if (choice === 'auto' && !schema) body.grammar = `root ::= ${JSON.stringify(TEXT)}`;
  return fetch(where, { ...init, body: JSON.stringify(body) });
};
const here = { baseURL: `${url}/v1`, apiKey: 'none', fetch: holding };
const openai = createOpenAI(here);
const compatible = createOpenAICompatible({ ...here, name: 'local', includeUsage: true, supportsStructuredOutputs: true });
const anthropic = createAnthropic(here);
const models = {
  responses: openai(name),
  chat: openai.chat(name),
  compatible: compatible(name),
  messages: anthropic(name),
};
const Weather = z.object({ city: z.enum(['Rome', 'Oslo']), days: z.literal([1, 2, 3]) });
const question = { role: 'user', content: 'How is the weather in Rome?' };
const quiet = { maxRetries: 0, onError: () => {} };

for (const [api, model] of Object.entries(models)) {
  const asked = { model, messages: [question], maxOutputTokens: 100, temperature: 0, ...quiet };
  const whole = await generateText(asked);
  assert.equal(whole.text, TEXT, api);
  const stream = streamText(asked);
  let text = '';
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, TEXT, api);
  assert.ok((await stream.usage).outputTokens > 0, api);

  // The second turn refers to what the first one said.
  const again = [question, ...whole.response.messages, { role: 'user', content: 'And tomorrow?' }];
  assert.equal((await generateText({ ...asked, messages: again })).text, TEXT, api);

  const heard = [];
  const weather = tool({
    description: 'Says the weather.',
    inputSchema: Weather,
    execute: async (place) => (heard.push(place), 'sunny'),
  });
  const called = { ...asked, tools: { weather }, toolChoice: 'required', maxOutputTokens: 200 };
  const call = await generateText({ ...called, stopWhen: stepCountIs(1) });
  Weather.parse(heard[0]);
  const after = [question, ...call.response.messages, { role: 'user', content: 'Thanks.' }];
  assert.equal((await generateText({ ...asked, tools: { weather }, messages: after })).text, TEXT, api);
  const streamed = streamText({ ...called, stopWhen: stepCountIs(1) });
  const parts = [];
  for await (const part of streamed.fullStream) parts.push(part.type);
  assert.ok(parts.includes('tool-call') && parts.includes('tool-result'), `${api}: ${parts}`);
  assert.deepEqual(heard[1], heard[0], api);

  const held = { ...asked, output: Output.object({ schema: Weather }), maxOutputTokens: 200 };
  Weather.parse((await generateText(held)).output);
  const partial = streamText(held);
  let last;
  for await (const piece of partial.partialOutputStream) last = piece;
  Weather.parse(last);
}
