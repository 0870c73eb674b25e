"use strict";

/* Names, marks, numbers and the making of elements. Text from the recording only ever becomes text nodes. */

const KINDS = {
  accepted: {mark: "✓", name: "accepted", means: "a guess that the target accepted"},
  recovered: {mark: "→", name: "recovered", means: "the target's own token in place of a rejected guess"},
  bonus: {mark: "+", name: "bonus", means: "the target's own token after a fully accepted draft"},
  plain: {mark: "·", name: "plain", means: "the target's own token; nothing was guessed"},
};
const SOURCES = {model: "draft model", ngram: "n-gram", "early-exit": "early exit"};
const PARTS = ["draft", "verify", "other"];
const ENDS = {
  stop: ["end", "the model, or a stop string, ended the answer"],
  length: ["limit", "the token budget, or the context, was used up"],
  cancelled: ["stopped", "stopped by hand"],
};

/* element("p.note", {title: "…"}, "text", child): the class after the dot, attributes, children. */
function element(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const $ = (id) => document.getElementById(id);

/* Token text in one line, with what would not be seen. */
function word(text) {
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "…";
}

/* The same for text that stands among other text: spaces stay spaces. */
function inline(text) {
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
}

const sourceName = (source) => SOURCES[source] || source;
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);
const milliseconds = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : ms < 10000 ? `${ms.toFixed(0)} ms` : seconds(ms / 1000));
const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : Math.abs(n) && /(s|sh|ss)$/.test(noun) ? "es" : "s"}`;

/* Drafters get an underline and a hue each, in the order in which they first appear behind those that are known. */
class Styles {
  constructor() {
    this.slots = new Map([["model", 0], ["ngram", 1], ["head", 2], ["corpus", 4]]);
  }

  slot(drafter) {
    const source = drafter?.replace(/^(corpus)\d+$/, "$1");  // of several corpora
    if (!this.slots.has(source)) this.slots.set(source, 2 + ((this.slots.size + 1) % 2));
    return this.slots.get(source);
  }

  /* Classes of an emitted token. */
  token(token) {
    return token.kind === "accepted" ? `accepted s${this.slot(token.source)}` : token.kind;
  }

  guess(guess) {
    return guess.accepted ? `accepted s${this.slot(guess.source)}` : "rejected";
  }
}

/* The guess that a guess comes after; -1 is the last settled token. */
const before = (round, index) => round.draft[index].parent ?? index - 1;

/* "⑂ " where a guess does not come after the one before it: a branch begins. */
const fork = (round, index) => (before(round, index) === index - 1 ? "" : "⑂ ");

/* "after guess 2", in words. */
const follows = (round, index) => `after ${before(round, index) < 0 ? "the last token" : `guess ${before(round, index) + 1}`}`;

/* The guess that an emitted token was, if it was one. */
function guessOf(round, index) {
  const token = round.emitted[index], guess = round.draft.filter((each) => each.accepted)[index];
  return token.kind === "accepted" && guess && guess.accepted && guess.id === token.id ? guess : null;
}

/* What became of a guess, in words. */
function fate(round, index) {
  const guess = round.draft[index];
  if (guess.accepted) {
    const token = round.emitted[round.draft.slice(0, index).filter((each) => each.accepted).length];
    const said = token && token.kind === "accepted";
    return said ? ["✓", "accepted"] : ["✓", "accepted, behind the end"];
  }
  const parent = before(round, index);
  return parent >= 0 && !round.draft[parent].accepted ? ["✗", "dropped"] : ["✗", "rejected"];
}
