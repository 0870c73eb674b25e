"use strict";

/* One round in full: the guesses as cards, the target's pass over them, what came out, and why it was done so. */

class RoundView {
  constructor(box, styles) {
    this.box = box;
    this.styles = styles;
    this.index = -1;
  }

  show(answer) {
    this.answer = answer;
    this.index = -1;
  }

  move(position) {
    if (position.round !== this.index) this.replace(position.round);
    this.box.dataset.phase = PARTS[position.phase];
    const nMade = made(this.answer.rounds[position.round], position);
    this.cards.forEach((card, i) => card.classList.toggle("unborn", i >= nMade));
  }

  /* The keyboard's place in the old round is kept in the new one. */
  replace(index) {
    const places = () => [...this.box.querySelectorAll("[tabindex]")];
    const focused = places().indexOf(document.activeElement);
    this.draw(index);
    if (focused < 0) return;
    const now = places();
    if (now.length) now[Math.min(focused, now.length - 1)].focus({preventScroll: true});
  }

  /* Scrolls to the step that is going on, where the round is taller than its place. */
  follow() {
    const step = this.box.querySelector(`.step-${this.box.dataset.phase}`);
    keepInView(this.box.parentElement, step.getBoundingClientRect(), 8);
  }

  draw(index) {
    this.index = index;
    const round = this.answer.rounds[index];
    this.cards = round.draft.map((guess, i) => this.card(round, i));
    this.box.dataset.round = index;
    this.box.replaceChildren(
      step("draft", "Draft", sourcesOf(round), round.ms[DRAFT], round.draft.length
        ? element("ol.cards", {}, ...this.cards)
        : element("p.none", {}, "no guesses: plain decoding")),
      step("verify", "Verify", "", round.ms[VERIFY], this.pass(round)),
      step("other", "Accept", "", round.ms[ACCEPT], this.emitted(round)),
      this.times(round),
      ...(round.reason ? [element("p.reason", {}, element("b", {}, "Why "), round.reason)] : []),
    );
  }

  card(round, index) {
    const guess = round.draft[index];
    const [mark, name] = fate(round, index);
    const label = `guess ${index + 1}: ${word(guess.text)}, from ${sourceName(guess.source)}, `
      + `probability ${percent(guess.prob)}, expected ${percent(guess.expected)}, ${name}`
      + (fork(round, index) && `, a branch ${follows(round, index)}`);
    const card = element("li.card", {tabindex: "0", "data-guess": index, "aria-label": label},
      element("span.line", {}, element("span.word", {}, fork(round, index) + word(guess.text)), element("span.share", {}, percent(guess.prob))),
      meter(guess),
      element("span.fate", {}, element("span.mark", {}, mark), ` ${name}`));
    card.className += ` ${this.styles.guess(guess)} ${name.split(",")[0]}`;
    return card;
  }

  /* The pass is as wide as what it reads: the last settled token and every guess. */
  pass(round) {
    const width = round.draft.length + 1;
    const cells = Array.from({length: width}, (_, i) => element(
      i === 0 ? "span.cell.settled" : `span.cell.${round.draft[i - 1].accepted ? "yes" : "no"}`));
    const all = round.draft.length ? `the last token and ${count(round.draft.length, "guess")}` : "the last token";
    const expected = round.ms_verify_expected === null ? "" : `; ${milliseconds(round.ms_verify_expected)} expected`;
    return element("div.pass", {},
      element("span.cells", {"aria-hidden": "true"}, ...cells),
      element("span", {}, `one pass over ${count(width, "token")}: ${all}${expected}`));
  }

  emitted(round) {
    const tokens = round.emitted.map((token, i) => {
      const {mark, name} = KINDS[token.kind];
      const text = this.text(token, i);
      const from = token.kind === "accepted" ? ` from ${sourceName(token.source)}` : "";
      const chip = element("li.chip", {tabindex: "0", "data-token": i, "aria-label": `${text}, ${name}${from}`},
        element("span.mark", {}, mark), " ", element("span.word", {}, text),
        element("span.kind", {}, name));
      chip.className += ` ${this.styles.token(token)}`;
      return chip;
    });
    return tokens.length ? element("ul.chips", {}, ...tokens) : element("p.none", {}, "nothing");
  }

  /* The text of an emitted token; the one that ends the answer has none. */
  text(token, index) {
    const round = this.answer.rounds[this.index];
    const last = this.index === this.answer.rounds.length - 1 && index === round.emitted.length - 1;
    if (token.text || token.cut) return word(token.text + (token.cut || ""));
    return last && this.answer.finish_reason === "stop" ? "end of text" : word("");
  }

  times(round) {
    const total = round.ms[0] + round.ms[1] + round.ms[2];
    const n = round.emitted.length;
    const each = n > 1 ? `, ${milliseconds(total / n)} a token` : "";
    const expected = round.tokens_expected === null ? "" : ` (expected ${round.tokens_expected.toFixed(1)})`;
    return element("div.times", {},
      partsBar(round.ms.map((ms, i) => [PARTS[i], ms])),
      element("p", {}, `${milliseconds(total)} for ${count(n, "token")}${expected}${each}`));
  }
}

/* Who guessed: "n-gram", or "n-gram 2, draft model 3". */
function sourcesOf(round) {
  const counts = new Map();
  for (const {source} of round.draft) counts.set(source, (counts.get(source) || 0) + 1);
  return [...counts].map(([source, n]) => sourceName(source) + (counts.size > 1 ? ` ${n}` : "")).join(", ");
}

function step(name, title, by, ms, content) {
  return element(`section.step.step-${name}`, {},
    element("h3", {}, title, " ", element("span.by", {}, by), element("span.ms", {}, milliseconds(ms))), content);
}

/* The drafter's probability as a bar, the calibrated expectation as a tick on it. */
function meter(guess) {
  const bar = element("span.meter", {"aria-hidden": "true"});
  const fill = element("span.fill"), tick = element("span.tick");
  fill.style.width = `${100 * (guess.prob || 0)}%`;
  bar.append(fill);
  if (guess.expected !== null) {
    tick.style.left = `${100 * guess.expected}%`;
    bar.append(tick);
  }
  return bar;
}

/* [[part, amount], …] as a bar in proportion. */
function partsBar(parts) {
  const bar = element("div.parts", {"aria-hidden": "true"});
  const whole = parts.reduce((sum, [, amount]) => sum + amount, 0);
  for (const [part, amount] of parts.filter(([, amount]) => amount > 0)) {
    const piece = element(`span.part-${part}`);
    piece.style.flexGrow = amount / whole;
    bar.append(piece);
  }
  return bar;
}
