"use strict";

/* Recorded time. A position is {round, phase, fraction}: how far (0 to 1) into which phase of which round. In the phase
   ACCEPT the verdict is known; a round that is over is {round, phase: ACCEPT, fraction: 1}. */

const DRAFT = 0, VERIFY = 1, ACCEPT = 2;
const SLOW = 0;

class Timeline {
  constructor(rounds) {
    this.rounds = rounds;
    this.starts = [0]; // milliseconds before each round, and at the end
    this.tokens = [0]; // tokens emitted before each round, and in all
    rounds.forEach((round, i) => {
      this.starts.push(this.starts[i] + this.length(round));
      this.tokens.push(this.tokens[i] + round.emitted.length);
    });
    this.total = this.starts[rounds.length];
  }

  /* Milliseconds of a phase. A file without times still has rounds to walk through. */
  phase(round, phase) {
    const [draft, verify, other] = round.ms;
    return draft + verify + other > 0 ? round.ms[phase] : Number(phase === VERIFY);
  }

  length(round) {
    return this.phase(round, DRAFT) + this.phase(round, VERIFY) + this.phase(round, ACCEPT);
  }

  get start() {
    return {round: 0, phase: DRAFT, fraction: 0};
  }

  get end() {
    return this.done(this.rounds.length - 1);
  }

  /* The end of a round, or the start of all if it is before the first. */
  done(round) {
    if (round < 0) return this.start;
    return {round: Math.min(round, this.rounds.length - 1), phase: ACCEPT, fraction: 1};
  }

  isDone(position) {
    return position.phase === ACCEPT && position.fraction === 1;
  }

  isEnd(position) {
    return this.isDone(position) && position.round === this.rounds.length - 1;
  }

  /* Position -> milliseconds from the start. */
  time({round, phase, fraction}) {
    let ms = this.starts[round];
    for (let before = DRAFT; before < phase; before++) ms += this.phase(this.rounds[round], before);
    return ms + fraction * this.phase(this.rounds[round], phase);
  }

  /* Milliseconds from the start -> position; the moment between two rounds belongs to the one that is over. */
  at(ms) {
    if (ms <= 0) return this.start;
    let low = 0, high = this.rounds.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle + 1] < ms) low = middle + 1;
      else high = middle;
    }
    let left = ms - this.starts[low];
    for (let phase = DRAFT; phase <= ACCEPT; phase++) {
      const length = this.phase(this.rounds[low], phase);
      if (left < length) return {round: low, phase, fraction: left / length};
      left -= length;
    }
    return this.done(low);
  }

  /* The position some milliseconds of watching later. */
  later(position, ms, speed) {
    let {round, phase, fraction} = position;
    for (;;) {
      const length = this.watched(this.rounds[round], phase, speed);
      const rest = length * (1 - fraction);
      if (ms < rest) return {round, phase, fraction: fraction + ms / length};
      ms -= rest;
      if (phase < ACCEPT) phase++;
      else if (round + 1 < this.rounds.length) [round, phase] = [round + 1, DRAFT];
      else return this.end;
      fraction = 0;
    }
  }

  /* Milliseconds that a phase is watched for. */
  watched(round, phase, speed) {
    if (speed !== SLOW) return this.phase(round, phase) / speed;
    const guesses = round.draft.length;
    return [guesses ? 300 + 120 * guesses : 0, guesses ? 600 : 300, guesses ? 900 : 200][phase];
  }
}
