/* Names, numbers and the making of elements. What a model says only ever becomes text nodes. */

export const $ = (id) => document.getElementById(id);

/* element("p.note", {title: "…"}, "text", child): classes after the dots, attributes, children. */
export function element(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const SOURCES = {model: "draft model", ngram: "n-gram", grammar: "grammar", prediction: "prediction", corpus: "copy from files"};
const kind = (source) => source?.replace(/^(corpus)\d+$/, "$1");  // of several corpora
export const sourceName = (source) => SOURCES[kind(source)] || source;

/* Each drafter has an ink: an underline and a hue. */
const SLOTS = {model: 0, ngram: 1, grammar: 2, corpus: 4};
export const slot = (source) => SLOTS[kind(source)] ?? 3;

export const percent = (share) => `${(100 * share).toFixed(0)} %`;
export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 100_000 ? 2 : 0)} s`;
export const decimal = (number, digits = 1) => number.toFixed(digits);
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

export function alertIn(box, message) {
  box.hidden = !message;
  box.textContent = message;
}
