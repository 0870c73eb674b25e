/* The race: one prompt, answered plainly and with guesses, one after the other, and shown from the same start. */

import {answer, serverStats} from "./api.js";
import {typed} from "./browser.js";
import {Tally, roundMs} from "./figures.js";
import {showProblem} from "./settings.js";
import {AnswerText, following} from "./tokens.js";
import {$, alertIn, count, decimal, percent, seconds, times} from "./words.js";

const HEATS = 2; // of which each begins one
const BUSY = 0.15; // share of the CPUs' time that others use, from which on it is said

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Race {
  /* As for Chat. */
  constructor(settings, failed) {
    this.settings = settings;
    this.failed = failed;
    this.running = null;
    this.races = 0;
    this.plain = new Racer("plain-racer");
    this.speculative = new Racer("speculative-racer");
    this.racers = [this.plain, this.speculative];
    $("race-prompt").value = typed.get("race")?.text ?? $("race-prompt").value;
    $("race-prompt").addEventListener("input", () => typed.set("race", {text: $("race-prompt").value}));
    $("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    $("race-prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.run();
    });
    $("race-stop").addEventListener("click", () => this.stop());
    $("again").addEventListener("click", () => this.watchAgain());
  }

  async run() {
    const prompt = $("race-prompt").value.trim();
    if (!prompt || this.running || showProblem($("race-alert"))) return;
    let order = this.races++ % 2 ? [this.speculative, this.plain] : [this.plain, this.speculative];
    const {system, ...chosen} = this.settings();
    const messages = [...(system ? [{role: "system", content: system}] : []), {role: "user", content: prompt}];
    const settings = {...chosen, seed: chosen.seed ?? Math.floor(Math.random() * 2 ** 31)}; // both get the same dice
    $("verdict").textContent = "";
    alertIn($("race-alert"), "");
    const stopping = new AbortController();
    this.enter(stopping);
    const heats = [];
    try {
      const before = await cpu();
      do {
        await this.heat(order, messages, settings, stopping.signal, heats.length);
        heats.push(this.racers.map(({ms, total, guesses, ids}) => ({ms, tokens: total, guesses, ids})));
        order = order.toReversed();
      } while (heats.length < HEATS && heats[0].some(({guesses}) => guesses));
      const others = othersShare(before, await cpu());
      $("verdict").textContent = [verdict(heats), difference(...heats.at(-1).map(({ids}) => ids)), busy(others)].filter(Boolean).join(" ");
      await this.play(order[0].ms, stopping.signal);
    } catch (error) {
      if (error.name === "AbortError") $("verdict").textContent = [heats.length ? verdict(heats) : "", "The race was stopped."].filter(Boolean).join(" ");
      else if (!this.failed(error)) alertIn($("race-alert"), error.message);
    }
    this.enter(null);
  }

  /* One run of each, in that order. */
  async heat(order, messages, settings, signal, n) {
    const [first, second] = order, round = n ? ", second turn" : "";
    for (const racer of order) racer.reset();
    first.place(`runs first${round}`);
    second.place("waits for its turn");
    await this.record(first, messages, settings, signal, () => {});
    second.place(`runs now${round}`);
    first.place("ran first, shown again");
    first.rewind();
    await this.record(second, messages, settings, signal, (ms) => first.showUntil(ms));
    for (const racer of order) racer.place((racer === first ? "ran first" : "ran second") + round);
  }

  /* One side's run, live. */
  async record(racer, messages, settings, signal, tick) {
    const speculate = racer === this.speculative;
    for await (const event of answer(messages, {...settings, speculate}, signal)) {
      if (!event.round) continue;
      racer.rounds.push(event.round);
      racer.ms += roundMs(event.round);
      racer.showUntil(racer.ms);
      tick(racer.ms);
      this.measure();
    }
    racer.complete = true;
    racer.showUntil(racer.ms);
  }

  /* Shows both recordings at their own pace, from a time on. */
  async play(from, signal) {
    const end = Math.max(...this.racers.map((racer) => racer.ms));
    const started = performance.now();
    for (let now = from; now < end && !still.matches; now = from + performance.now() - started) {
      for (const racer of this.racers) racer.showUntil(now);
      this.measure();
      await new Promise(requestAnimationFrame);
      signal.throwIfAborted();
    }
    for (const racer of this.racers) racer.showUntil(end);
    this.measure();
  }

  async watchAgain() {
    if (this.running) return;
    const stopping = new AbortController();
    this.enter(stopping);
    for (const racer of this.racers) racer.rewind();
    try {
      await this.play(0, stopping.signal);
    } catch {
      for (const racer of this.racers) racer.showUntil(Infinity);
      this.measure();
    }
    this.enter(null);
  }

  stop() {
    this.running?.abort();
  }

  /* The track is as long as the longer answer; before there is a whole one, nobody knows how long that is. */
  measure() {
    const known = this.racers.some((racer) => racer.complete);
    const longest = known ? Math.max(1, ...this.racers.map((racer) => racer.total)) : Infinity;
    for (const racer of this.racers) racer.run(longest);
  }

  enter(running) {
    const active = document.activeElement;
    const hadFocus = [$("start"), $("race-stop"), $("again")].includes(active);
    this.running = running;
    $("start").disabled = Boolean(running);
    $("race-stop").disabled = !running;
    $("again").disabled = Boolean(running) || !this.racers.every((racer) => racer.complete);
    if (hadFocus) (running ? $("race-stop") : active === $("race-stop") ? $("start") : active).focus();
  }
}

/* One side: what was recorded of it, and how much of that is shown. */
class Racer {
  constructor(id) {
    const racer = $(id);
    const part = (name) => racer.querySelector(name);
    [this.clock, this.runner] = [part(".clock"), part(".runner")];
    this.text = new AnswerText(part(".text"));
    [this.figures, this.placeBox] = [part(".racer-figures"), part(".place")];
    this.reset();
  }

  reset() {
    this.rounds = [];
    this.ms = 0;
    this.complete = false;
    this.rewind();
    this.place("");
    this.clock.textContent = "–";
    this.figures.textContent = "";
  }

  rewind() {
    this.tally = new Tally();
    this.text.clear();
    this.run(1);
  }

  place(words) {
    this.placeBox.textContent = words;
  }

  get arrived() {
    return this.complete && this.tally.rounds === this.rounds.length;
  }

  get total() {
    return this.rounds.reduce((sum, round) => sum + round.emitted.length, 0);
  }

  get guesses() {
    return this.rounds.reduce((sum, round) => sum + round.draft.length, 0);
  }

  get ids() {
    return this.rounds.flatMap((round) => round.emitted.map((token) => token.id));
  }

  /* Shows what there was after so many milliseconds. */
  showUntil(ms) {
    following(this.text.box, () => {
      while (this.tally.rounds < this.rounds.length) {
        const next = this.rounds[this.tally.rounds];
        if (this.tally.ms + roundMs(next) > ms + 1e-6) break;
        this.tally.add(next);
        this.text.add(next);
      }
      if (this.arrived) this.text.finish();
    });
    const arrived = this.arrived;
    this.clock.textContent = seconds(arrived ? this.ms : Math.min(ms, this.ms)) + (arrived ? " ✓" : "");
    this.figures.textContent = `${count(this.tally.tokens, "token")} · ${this.tally.line()}`;
  }

  run(longest) {
    this.runner.style.width = `${(100 * this.tally.tokens) / longest}%`;
  }
}

/* What came of it, in words. heats: for each the figures of the plain run and of the speculative one. */
function verdict(heats) {
  const ratios = heats.map(([plain, speculative]) => speculative.tokens / speculative.ms / (plain.tokens / plain.ms));
  if (!ratios.every(Number.isFinite) || !ratios.every(Boolean)) return "There are no tokens to compare.";
  if (!heats.some(([, speculative]) => speculative.guesses)) {
    return "Nothing was guessed, so both did the same work; the difference is noise.";
  }
  const [plain, speculative] = [0, 1].map((side) => {
    const sum = (what) => heats.reduce((total, heat) => total + heat[side][what], 0);
    return (1000 * sum("tokens")) / sum("ms");
  });
  const speeds = `${decimal(speculative)} against ${decimal(plain)} tokens a second`;
  const each = ratios.map(times).join(" and ");
  if (ratios.length < HEATS) return `Speculative ran at ${each} of plain in the first turn: ${speeds}.`;
  if (ratios.some((ratio) => ratio > 1) !== ratios.every((ratio) => ratio > 1)) {
    return `No difference that this race could tell: by turn, speculative ran at ${each} of plain.`;
  }
  return `Speculative ran at ${times(speculative / plain)} of plain: ${speeds}; by turn ${each}.`;
}

/* Counters of the CPU's time; null where the server gives none. */
async function cpu() {
  return (await serverStats()).cpu || null;
}

function othersShare(before, after) {
  if (!before || !after || after.at <= before.at) return 0;
  return (after.busy - before.busy - (after.own - before.own)) / ((after.at - before.at) * after.n_cpus);
}

function busy(share) {
  return share < BUSY ? "" : `Other programs, this browser among them, used ${percent(Math.min(1, share))} of the CPU meanwhile, which can change all of this.`;
}

function difference(plain, speculative) {
  const shorter = Math.min(plain.length, speculative.length);
  const at = plain.findIndex((id, i) => i < shorter && id !== speculative[i]);
  if (at >= 0) {
    return `The answers are equal for ${count(at, "token")} and then part: passes over several tokens round differently than passes over one, so near ties can fall either way.`;
  }
  if (plain.length === speculative.length) return `The answers are the same: all ${count(shorter, "token")} are equal.`;
  return `The answers are equal for ${count(shorter, "token")}, then one of them ended.`;
}
