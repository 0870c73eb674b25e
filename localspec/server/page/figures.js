/* What an answer costs and gains, counted while it is made: the same figures that the server counts. */

import {serverStats} from "./api.js";
import {$, decimal, element, percent, slot, times} from "./words.js";

const STRIP = 72; // rounds that fit into the strip
const CELLS = 9; // and tokens into a column of it

export class Tally {
  constructor() {
    this.tokens = this.thoughts = this.rounds = this.guesses = this.accepted = this.ms = 0;
    this.faster = null; // how many times as fast as without guesses, as the server estimates it of the whole answer
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

  /* "70 of 88" */
  get right() {
    return `${this.accepted.toLocaleString("en")} of ${this.guesses.toLocaleString("en")}`;
  }

  /* "plain, 6.7 tok/s" as long as nothing was guessed; then "9.6 tok/s · ×1.33 · 70 of 88 guesses right" */
  line() {
    const speed = `${decimal(this.speed)} tok/s`;
    if (!this.guesses) return `plain, ${speed}`;
    return [speed, this.faster && times(this.faster), `${this.right} guesses right`].filter(Boolean).join(" · ");
  }
}

export const roundMs = (round) => round.ms_draft + round.ms_verify + round.ms_other;

/* The panel of figures. isShared: answers of several clients share passes. */
export class Figures {
  /* What answers of all clients shared since the start. */
  async shared() {
    const {passes, mean_answers, rows} = (await serverStats()).parallel.passes;
    const all = rows.answers + rows.drafts + rows.prompts;
    const [own, drafts, prompts] = [rows.answers, rows.drafts, rows.prompts].map((n) => percent(n / all));
    $("shared").textContent = `Shared with other chats: on average ${decimal(mean_answers)} answers at once.`;
    $("shared-details").textContent = `${passes.toLocaleString("en")} passes of the model since the server started; of their `
      + `rows ${own} were next tokens, ${drafts} guesses, ${prompts} prompts.`;
    $("shared-box").hidden = false;
  }

  start() {
    $("strip").replaceChildren();
    for (const id of ["speed", "faster", "acceptance", "length"]) $(id).textContent = "…";
    $("why").textContent = "";
  }

  show(tally, round) {
    $("speed").textContent = decimal(tally.speed);
    $("faster").textContent = tally.guesses ? "…" : "plain";
    $("acceptance").textContent = tally.guesses ? tally.right : "none made";
    $("length").textContent = decimal(tally.tokens / tally.rounds, 2);
    const strip = $("strip");
    strip.append(column(round));
    if (strip.childElementCount > STRIP) strip.firstElementChild.remove();
  }

  finish(tally, stats, explanation) {
    tally.faster = tally.guesses ? stats.estimated_speedup : null;
    $("speed").textContent = decimal(stats.tokens_per_second);
    $("faster").textContent = tally.guesses ? (tally.faster ? times(tally.faster) : "unknown") : "plain";
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
