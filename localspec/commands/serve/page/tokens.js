/* Rounds as text: every token in the style of its origin, every rejected guess struck through where it was made. */

import {element, percent, slot, sourceName} from "./words.js";

const OWN = {
  recovered: "the target's own, in place of a rejected guess",
  bonus: "the target's own, after all guesses were accepted",
  plain: "the target's own; nothing was guessed",
  forced: "put there to end the thinking, whose budget was spent",
};

const thought = (token) => (token.thinking ? ".thought" : "");
const inLine = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
const expectation = (guess) => (guess ? `, expected to be right with ${percent(guess.expected)}` : "");

/* The text of an answer, in a box. */
export class AnswerText {
  constructor(box) {
    this.box = box;
    this.clear();
  }

  clear() {
    this.box.replaceChildren();
    this.shown = this.released = "";
  }

  add(round) {
    const accepted = round.emitted.filter((token) => token.kind === "accepted");
    const own = round.emitted.filter((token) => token.kind !== "accepted");
    const kept = round.draft.filter((guess) => guess.accepted);
    accepted.forEach((token, i) => {
      const title = `guess of the ${sourceName(token.source)}, accepted${expectation(kept[i])}`;
      this.put(element(`span.token.accepted.s${slot(token.source)}${thought(token)}`, {title}, token.text));
    });
    round.draft.forEach((guess, i) => {
      if (guess.accepted) return;
      const parent = guess.parent ?? i - 1;  // a draft that branches says what each guess comes after
      const fate = parent >= 0 && !round.draft[parent].accepted ? "behind a wrong one, dropped" : "rejected";
      const title = `guess of the ${sourceName(guess.source)}, ${fate}${expectation(guess)}`;
      this.put(element("del.token.rejected", {title, "aria-hidden": "true"}, (parent === i - 1 ? "" : "⑂") + inLine(guess.text)));
    });
    for (const token of own) {
      this.put(element(`span.token.${token.kind}${thought(token)}`, {title: OWN[token.kind] || token.kind}, token.text));
    }
    this.shown += round.emitted.filter((token) => !token.thinking).map((token) => token.text).join("");
    this.released += round.text;
  }

  /* What belongs to no token in particular: an answer may end in the middle of a character. */
  finish() {
    const rest = this.released.slice(this.shown.length);
    this.put(element("span.token.plain", {}, rest));
    this.shown += rest;
  }

  /* A token without text, half of a character say, or an end token, leaves nothing to see. */
  put(made) {
    if (made.textContent) this.box.append(made);
  }
}

/* Lets a box be written to, and keeps its end in sight if it was. */
export function following(scroller, write) {
  const follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 24;
  write();
  if (follows) scroller.scrollTop = scroller.scrollHeight;
}

export function drawLegend(list) {
  const entries = [
    ["accepted s0", "draft model's guess, accepted"],
    ["accepted s1", "n-gram's guess, accepted; recycled ones too"],
    ["accepted s2", "grammar's guess, accepted"],
    ["accepted s3", "guess of a head, or of the model's own layers, accepted"],
    ["accepted s4", "copy from files, accepted"],
    ["rejected", "guess, rejected"],
    ["recovered", "target's own, in its place"],
    ["bonus", "target's own, on top of the guesses"],
    ["plain", "target's own; nothing guessed"],
  ];
  for (const [style, text] of entries) {
    const tag = style === "rejected" ? "del" : "span";
    list.append(element("li", {}, element(`${tag}.token.${style.replace(" ", ".")}`, {}, text)));
  }
}
