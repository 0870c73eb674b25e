"use strict";

/* Details of what the pointer or the keyboard is on. Escape takes them away. */

class Tip {
  constructor(box, describe) {
    this.box = box;
    this.describe = describe;
    this.target = null;
    document.addEventListener("pointerover", (event) => this.over(event));
    document.addEventListener("focusin", (event) => this.show(event.target));
    document.addEventListener("focusout", () => this.hide());
    document.addEventListener("scroll", () => this.hide(), true);
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
  }

  over(event) {
    if (this.box.contains(event.target)) return;
    const focused = document.activeElement;
    if (!this.show(event.target) && !this.show(focused)) this.hide();
  }

  /* Shows the details of an element, if it has any. */
  show(element) {
    const target = element instanceof Element && element.closest("[data-token], [data-guess], [data-why]");
    if (!target) return false;
    if (target !== this.target) {
      this.hide();
      this.target = target;
      this.fill(this.describe(target));
      target.setAttribute("aria-describedby", this.box.id);
      this.place(target.getClientRects()[0]);
    }
    return true;
  }

  fill({text, title, rows}) {
    const list = rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
    const shown = text ? [element("code", {}, text), " "] : [];
    this.box.replaceChildren(element("p", {}, ...shown, title), element("dl", {}, ...list));
  }

  /* Shows details at a place of the window, for what is not an element. */
  at(details, anchor) {
    this.hide();
    this.fill(details);
    this.place(anchor);
  }

  /* Under the element, or above it where there is no room; never beyond the window. */
  place(anchor) {
    if (!anchor) return this.hide();
    this.box.hidden = false;
    const {width, height} = this.box.getBoundingClientRect();
    const left = Math.max(8, Math.min(anchor.left, document.documentElement.clientWidth - width - 8));
    const below = anchor.bottom + 6;
    const top = below + height < window.innerHeight - 8 ? below : Math.max(8, anchor.top - height - 6);
    this.box.style.left = `${left}px`;
    this.box.style.top = `${top}px`;
  }

  hide() {
    if (this.target) this.target.removeAttribute("aria-describedby");
    this.target = null;
    this.box.hidden = true;
  }
}

/* What there is to say of a token of a round: [data-token] or [data-guess], its index. */
function describeToken(answer, index, data) {
  const round = answer.rounds[index];
  const rows = [];
  const draftRows = (guess) => {
    rows.push(["from", sourceName(guess.source)]);
    rows.push(["probability", `${percent(guess.prob)}, the drafter's own`]);
    if (guess.expected !== null) rows.push(["expected", `${percent(guess.expected)}, calibrated`]);
  };
  let token, title;
  if (data.guess !== undefined) {
    token = round.draft[data.guess];
    const [mark, name] = fate(round, Number(data.guess));
    const why = name === "dropped" ? "dropped: behind a rejected guess" : name;
    title = `${mark} ${why}`;
    draftRows(token);
    rows.push(["guess", `${Number(data.guess) + 1} of ${round.draft.length}`]);
    if (fork(round, Number(data.guess))) rows.push(["branch", follows(round, Number(data.guess))]);
  } else {
    token = round.emitted[data.token];
    const {mark, means} = KINDS[token.kind];
    title = `${mark} ${means}`;
    const guess = guessOf(round, Number(data.token));
    if (guess) draftRows(guess);
    if (token.cut) rows.push(["behind the end", word(token.cut)]);
    if (!token.text && !token.cut) rows.push(["text", "none: an end token, or part of a character that a later token completes"]);
  }
  if (token.id !== null) rows.push(["token id", String(token.id)]);
  rows.push(["round", `${index + 1} of ${answer.rounds.length}`], ...roundRows(round));
  return {text: token.text && word(token.text), title, rows};
}

function describeRound(answer, index) {
  const round = answer.rounds[index];
  const accepted = round.draft.filter((guess) => guess.accepted).length;
  const rows = round.draft.length ? [["guesses", `${accepted} of ${round.draft.length} accepted`]] : [];
  return {title: `Round ${index + 1} of ${answer.rounds.length}`, rows: [...rows, ...roundRows(round)]};
}

function roundRows(round) {
  const total = round.ms[0] + round.ms[1] + round.ms[2];
  return [
    ["took", `${milliseconds(total)} for ${count(round.emitted.length, "token")}`],
    ["of it", round.ms.map((ms, i) => `${PARTS[i]} ${milliseconds(ms)}`).join(", ")],
  ];
}
