"use strict";

/* All rounds along their time, on a canvas. A round's floor is as long as it took, split into draft, verify and other;
   on it stands a tower of what came out of it: tokens in their styles, rejected guesses hollow. */

const FLOOR = 7;
const WIDTH = 7; // pixels that a middling round takes at least; more rounds than fit scroll by

class StripView {
  constructor(canvas, styles, {jump, hover}) {
    this.canvas = canvas;
    this.styles = styles;
    this.pen = canvas.getContext("2d");
    canvas.addEventListener("click", (event) => jump(this.roundAt(event)));
    canvas.addEventListener("pointermove", (event) => hover(this.roundAt(event), this.place(event)));
    canvas.addEventListener("pointerleave", () => hover(null));
    new ResizeObserver(() => this.resize()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.resize());
  }

  show(answer, timeline) {
    this.answer = answer;
    this.timeline = timeline;
    this.tallest = Math.max(2, ...answer.rounds.map((round) => tower(round).length));
    this.from = 0;
    this.position = timeline.end;
    this.resize();
  }

  resize() {
    if (!this.answer) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    this.colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const {rounds, total} = {rounds: this.answer.rounds.length, total: this.timeline.total};
    this.scale = Math.max(this.width, rounds * WIDTH) / total; // pixels per millisecond
    this.move(this.position);
  }

  move(position) {
    this.position = position;
    const now = this.timeline.time(position) * this.scale;
    const all = this.timeline.total * this.scale;
    // Scrolled so that the present keeps away from both ends.
    const edge = this.width / 5;
    if (now < this.from + edge) this.from = now - edge;
    if (now > this.from + this.width - edge) this.from = now - this.width + edge;
    this.from = Math.max(0, Math.min(this.from, all - this.width));
    this.draw(now - this.from);
  }

  draw(now) {
    const {pen, timeline, width, height} = this;
    pen.clearRect(0, 0, width, height);
    let index = timeline.at(this.from / this.scale).round;
    for (; index < this.answer.rounds.length; index++) {
      const left = timeline.starts[index] * this.scale - this.from;
      if (left > width) break;
      this.round(index, left, timeline.starts[index + 1] * this.scale - this.from);
    }
    pen.fillStyle = this.colour("focus");
    pen.fillRect(Math.min(now, width - 1) - 1, 0, 2, height);
  }

  round(index, left, right) {
    const {pen, height} = this;
    const round = this.answer.rounds[index];
    const gap = right - left > 3 ? 1 : 0;
    pen.globalAlpha = index > this.position.round ? 0.4 : 1;
    if (index === this.position.round) {
      pen.fillStyle = this.colour("now");
      pen.fillRect(left, 0, right - left, height);
    }
    let x = left;
    PARTS.forEach((part, phase) => {
      const length = this.timeline.phase(round, phase) * this.scale;
      const end = phase === ACCEPT ? right - gap : x + length;
      pen.fillStyle = this.colour(`part-${part}`);
      // Heights differ with the colours: the target's pass is the full floor.
      const thick = phase === VERIFY ? FLOOR : FLOOR / 2;
      pen.fillRect(x, height - thick, Math.max(0, end - x), thick);
      x += length;
    });
    const unit = Math.min(8, (height - FLOOR - 3) / this.tallest);
    tower(round).forEach((style, i) => {
      const bottom = height - FLOOR - 2 - i * unit;
      const size = Math.max(1, unit - (unit > 2.5 ? 1 : 0)), wide = Math.max(1, right - left - gap);
      if (style === "rejected") {
        pen.strokeStyle = this.colour("rejected");
        pen.lineWidth = 1;
        if (wide > 3 && size > 2) pen.strokeRect(left + 0.5, bottom - size + 0.5, wide - 1, size - 1);
        else { pen.globalAlpha *= 0.5; pen.fillStyle = this.colour("rejected"); pen.fillRect(left, bottom - size, wide, size); }
      } else {
        pen.fillStyle = this.colour(style === "accepted" ? `s${this.styles.slot(round.emitted[i]?.source)}-line` : `${style}-line`);
        pen.fillRect(left, bottom - size, wide, size);
      }
    });
    pen.globalAlpha = 1;
  }

  roundAt(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    return this.timeline.at((x + this.from) / this.scale).round;
  }

  /* Where to say something about the round under the pointer. */
  place(event) {
    const {top} = this.canvas.getBoundingClientRect();
    return {left: event.clientX - 40, top, bottom: window.innerHeight};
  }
}

/* A round's tower from the ground up: the kinds of its tokens, then its rejected guesses. */
function tower(round) {
  const rejected = round.draft.filter((guess) => !guess.accepted).map(() => "rejected");
  return [...round.emitted.map((token) => token.kind), ...rejected];
}
