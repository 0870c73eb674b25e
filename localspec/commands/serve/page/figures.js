/* What an answer costs and gains, counted while it is made: the same figures that the server counts. */

import {serverStats} from "./api.js";
import {$, decimal, element, percent, slot} from "./words.js";

const STRIP = 72; // rounds that fit into the strip
const CELLS = 9; // and tokens into a column of it

export class Tally {
  constructor() {
    this.tokens = this.thoughts = this.rounds = this.guesses = this.accepted = this.ms = 0;
  }

  add(round) {
    this.rounds += 1;
    this.tokens += round.emitted.length;
    this.thoughts += round.emitted.filter((token) => token.thinking).length;
    this.guesses += round.draft.length;
    this.accepted += round.draft.filter((guess) => guess.accepted).length;
    this.ms += roundMs(round);
  }

  get speed() {
    return this.ms ? (1000 * this.tokens) / this.ms : 0;
  }

  /* "12.3 tok/s · 92 % of 110 guesses accepted · 2.10 tokens a pass" */
  line() {
    const guesses = this.guesses ? `${percent(this.accepted / this.guesses)} of ${this.guesses} guesses accepted` : "no guesses";
    const length = this.rounds ? ` · ${decimal(this.tokens / this.rounds, 2)} tokens a pass` : "";
    return `${decimal(this.speed)} tok/s · ${guesses}${length}`;
  }
}

export const roundMs = (round) => round.ms_draft + round.ms_verify + round.ms_other;

/* The panel of figures. isShared: answers of several clients share passes. */
export class Figures {
  /* What the passes were for that answers of all clients shared since the start. */
  async shared() {
    const {passes, mean_answers, rows} = (await serverStats()).parallel.passes;
    const all = rows.answers + rows.drafts + rows.prompts;
    const [own, drafts, prompts] = [rows.answers, rows.drafts, rows.prompts].map((n) => percent(n / all));
    $("shared").textContent = `Of all clients: ${passes.toLocaleString("en")} passes, ${decimal(mean_answers)} answers a pass; `
      + `rows: ${own} next tokens, ${drafts} guesses, ${prompts} prompts.`;
  }

  start(plainSpeed) {
    $("strip").replaceChildren();
    $("plain-speed").textContent = plainSpeed ? decimal(plainSpeed) : "–";
    for (const id of ["speed", "acceptance", "length"]) $(id).textContent = "…";
    $("why").textContent = "";
  }

  show(tally, round) {
    $("speed").textContent = decimal(tally.speed);
    $("acceptance").textContent = tally.guesses ? percent(tally.accepted / tally.guesses) : "none made";
    $("length").textContent = decimal(tally.tokens / tally.rounds, 2);
    const strip = $("strip");
    strip.append(column(round));
    if (strip.childElementCount > STRIP) strip.firstElementChild.remove();
  }

  finish(stats, explanation) {
    const plain = stats.estimated_plain_tokens_per_second;
    if (plain) $("plain-speed").textContent = decimal(plain);
    $("speed").textContent = decimal(stats.tokens_per_second);
    $("why").textContent = explanation;
    if (this.isShared) this.shared().catch(() => {}); // it is no figure of the answer: the next one says it
  }
}

function column(round) {
  const cells = [
    ...round.draft.filter((guess) => guess.accepted).map((guess) => `b.s${slot(guess.source)}`),
    ...round.draft.filter((guess) => !guess.accepted).map(() => "b.wrong"),
  ].slice(0, CELLS);
  if (round.emitted.some((token) => token.kind !== "accepted")) cells.push("b.own");
  return element("i", {}, ...cells.map((cell) => element(cell)));
}
