"use strict";

/* The answer: every emitted token in its style, every rejected guess where it was made. All of it is there from the start;
   moving in time only changes classes, so nothing jumps.

   Each line is a block of its own: browsers then lay out and paint again only the lines that change, and skip those out
   of sight, which keeps answers of ten thousand rounds fluid. A round that spans lines has a piece in each. */

class AnswerView {
  constructor(box, styles) {
    this.box = box;
    this.styles = styles;
  }

  show(answer) {
    this.answer = answer;
    this.current = 0;
    this.lines = [];
    this.line = null;
    this.pieces = answer.rounds.map(() => []); // for each round, its elements
    answer.rounds.forEach((round, index) => this.round(round, index));
    const last = answer.rounds.length - 1;
    for (const part of lines(answer.text)) this.put(last, element("span.token"), part);
    const [name, why] = ENDS[answer.finish_reason] || ["cut short", "the recording ends here"];
    this.put(last, element("span.ending", {"data-why": why}), name);
    this.box.replaceChildren(...this.lines);
    this.box.scrollTop = 0;
  }

  round(round, index) {
    const put = (token, i) => {
      // A token without text, half a character say, still has its place.
      for (const part of token.text ? lines(token.text) : [""]) {
        this.put(index, element(`span.token.${this.styles.token(token).replace(" ", ".")}`, {"data-token": i}), part);
      }
      if (token.cut) this.put(index, element("span.cut", {"data-token": i, "aria-hidden": "true"}), inline(token.cut));
    };
    const own = round.emitted.findIndex((token) => token.kind !== "accepted");
    const nAccepted = own < 0 ? round.emitted.length : own;
    round.emitted.slice(0, nAccepted).forEach(put);
    round.draft.forEach((guess, i) => {
      if (guess.accepted) return;
      this.put(index, element("del.token.rejected", {"data-guess": i, "aria-hidden": "true"}), fork(round, i) + inline(guess.text));
    });
    round.emitted.slice(nAccepted).forEach((token, i) => put(token, nAccepted + i));
  }

  /* Adds text to the line, as part of a round; -1 is an answer without rounds. A newline ends the line. */
  put(index, made, text) {
    if (!this.line) this.lines.push(this.line = element("div.line"));
    let piece = this.line.lastElementChild;
    if (!piece || piece.dataset.round !== String(index)) {
      piece = element(index < 0 ? "span" : "span.round.future", {"data-round": index});
      this.line.append(piece);
      if (index >= 0) this.pieces[index].push(piece);
    }
    made.textContent = text;
    piece.append(made);
    if (text.endsWith("\n")) this.line = null;
  }

  /* Rounds before the position are settled, the one at it is in its phase, those behind it are still to come. */
  move(position) {
    const {round, phase} = position;
    for (let i = Math.min(this.current, round); i <= Math.max(this.current, round); i++) {
      for (const piece of this.pieces[i]) {
        piece.classList.toggle("future", i > round);
        piece.classList.toggle("now", i === round);
        if (i !== round) settle(piece);
      }
    }
    this.current = round;
    this.reveal(this.pieces[round], phase, made(this.answer.rounds[round], position));
  }

  /* What of the current round there is in a phase: the guesses made so far, and at the end the target's own token. */
  reveal(pieces, phase, nMade) {
    for (const piece of pieces) {
      piece.dataset.phase = PARTS[phase];
      for (const token of piece.children) {
        const {guess, token: index} = token.dataset;
        const guessed = token.matches(".accepted, .rejected");
        const born = guessed ? Number(guess ?? index) < nMade : phase === ACCEPT;
        token.classList.toggle("unborn", !born);
        token.classList.toggle("pending", guessed && phase !== ACCEPT);
      }
    }
  }

  /* Scrolls to the current round. */
  follow() {
    const pieces = this.pieces[this.current];
    if (!pieces.length) return;
    const {top} = pieces[0].getBoundingClientRect(), {bottom} = pieces[pieces.length - 1].getBoundingClientRect();
    keepInView(this.box, {top, bottom}, 48);
  }
}

function settle(piece) {
  if (!piece.dataset.phase) return;
  delete piece.dataset.phase;
  for (const token of piece.children) token.classList.remove("unborn", "pending");
}

/* Scrolls a box just as far as is needed to see what lies between top and bottom, and some margin. */
function keepInView(scroller, {top, bottom}, margin) {
  const box = scroller.getBoundingClientRect();
  const inner = Math.min(margin, box.height / 4);
  if (top < box.top + inner) scroller.scrollTop += top - box.top - inner;
  else if (bottom > box.bottom - inner) scroller.scrollTop += bottom - box.bottom + inner;
}

/* A text cut behind each newline. */
function lines(text) {
  return text.match(/[^\n]*\n|[^\n]+/g) || [];
}

/* How many guesses of a round have been made. */
function made(round, {phase, fraction}) {
  return phase === DRAFT ? Math.min(round.draft.length, Math.ceil(fraction * round.draft.length)) : round.draft.length;
}
