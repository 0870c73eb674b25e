/* Rounds as text: every token in the style of its origin, every wrong guess struck through where it was made. */

import {element, percent, slot, sourceName} from "./words.js";

const OWN = {
  recovered: "the model's own, in place of a wrong guess",
  bonus: "the model's own next token, after guesses that were all right",
  plain: "the model's own; nothing was guessed",
  forced: "put there to end the thinking, whose budget was spent",
};

const thought = (token) => (token.thinking ? ".thought" : "");
const inLine = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
const expectation = (guess) => (guess ? `; ${percent(guess.expected)} likely to be, it was thought` : "");

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
      const title = `guess (${sourceName(token.source)}), right${expectation(kept[i])}`;
      this.put(element(`span.token.accepted.s${slot(token.source)}${thought(token)}`, {title}, token.text));
    });
    round.draft.forEach((guess, i) => {
      if (guess.accepted) return;
      const parent = guess.parent ?? i - 1;  // a draft that branches says what each guess comes after
      const fate = parent >= 0 && !round.draft[parent].accepted ? "dropped, as the one before it was wrong" : "wrong";
      const title = `guess (${sourceName(guess.source)}), ${fate}${expectation(guess)}`;
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

/* The same when the box becomes smaller: an alert below it takes its room. */
export function follow(scroller) {
  let atEnd = true, height = scroller.clientHeight;
  scroller.addEventListener("scroll", () => {
    if (scroller.clientHeight === height) atEnd = scroller.scrollHeight - scroller.scrollTop - height < 24;
  });
  new ResizeObserver(() => {
    height = scroller.clientHeight;
    if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  }).observe(scroller);
}

export function drawLegend(list) {
  const entries = [
    ["accepted s0", "guess of a draft model, right"],
    ["accepted s1", "guess from the text so far, or an earlier token, right"],
    ["accepted s2", "guess of the grammar, right"],
    ["accepted s3", "guess of a head, or of the model's own layers, right"],
    ["accepted s4", "guess from files, right"],
    ["rejected", "wrong guess, rejected"],
    ["recovered", "the model's own, in its place"],
    ["bonus", "the model's own next token"],
    ["plain", "the model's own; nothing guessed"],
  ];
  for (const [style, text] of entries) {
    const tag = style === "rejected" ? "del" : "span";
    list.append(element("li", {}, element(`${tag}.token.${style.replace(" ", ".")}`, {}, text)));
  }
}
