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

/* Each kind of source of guesses: what people call it, and the number of its style, an underline and a hue. */
const DRAFTERS = {
  model: ["draft model", 0],
  ngram: ["copy from the text", 1],
  grammar: ["grammar", 2],
  head: ["head", 3],
  mtp: ["model's own MTP layer", 3],
  "early-exit": ["model's first layers", 3],
  corpus: ["copy from files", 4],
};
const OTHER = 3;
const kind = (source) => source?.replace(/\d+$/, ""); // the second draft model is model2, the third corpus corpus3
export const sourceName = (source) => DRAFTERS[kind(source)]?.[0] || source;
export const slot = (source) => DRAFTERS[kind(source)]?.[1] ?? OTHER;
/* The same of a drafter as the server names it: a draft model by its file, others with their settings, "early-exit:4". */
export const drafterName = (name) => DRAFTERS[kind(name.split(":")[0])]?.[0] || DRAFTERS.model[0];

export const size = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(0)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);
export const percent = (share) => `${(100 * share).toFixed(0)} %`;

/* What is being done to load a model, and how much of it is done where that is known. */
export const progressed = ({doing, fraction}) => `${doing}${fraction === null ? " …" : ` ${percent(fraction)}`}`;
export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 100_000 ? 2 : 0)} s`;
export const decimal = (number, digits = 1) => number.toFixed(digits);
export const times = (ratio) => `×${decimal(ratio, 2)}`;
export const duration = (s) => (s < 60 ? `${s} s` : `${Math.floor(s / 60)} min ${s % 60} s`); // of whole seconds
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

export function alertIn(box, message) {
  box.hidden = !message;
  box.textContent = message;
}

/* Says above the conversation what was done, with a button that undoes it; nothing takes the note away. undo(): a note of
   false, or a promise of it, stays. */
export function offerUndo(words, undo = null) {
  $("deleted-title").textContent = words;
  $("deleted").hidden = !words;
  $("undo").onclick = async () => {
    $("undo").disabled = true; // a second click would undo it twice
    const undone = (await undo()) !== false;
    $("undo").disabled = false;
    $("deleted").hidden = undone;
    $(undone ? "question" : "undo").focus();
  };
}
