"use strict";

/* Where in the recording we are, and the clock that moves it. */

class Player {
  constructor(changed) {
    this.changed = changed; // called after every change: "go", or "clock" for a frame
    this.speed = 1;
    this.playing = false;
  }

  load(timeline) {
    this.pause();
    this.timeline = timeline;
    this.position = timeline.end;
  }

  go(position) {
    this.position = position;
    this.changed("go");
  }

  seek(ms) {
    this.go(this.timeline.at(ms));
  }

  /* Rounds on or back; a round that is not over counts as one. */
  step(n) {
    const {round} = this.position;
    if (n > 0) this.go(this.timeline.done(this.timeline.isDone(this.position) ? round + n : round + n - 1));
    else this.go(this.timeline.done(round + n));
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
    this.changed("go");
  }

  play() {
    if (this.timeline.isEnd(this.position)) this.position = this.timeline.start;
    this.playing = true;
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      this.position = this.timeline.later(this.position, Math.max(0, now - before), this.speed);
      before = now;
      if (this.timeline.isEnd(this.position)) this.playing = false;
      else this.frame = requestAnimationFrame(tick);
      this.changed("clock");
    };
    this.frame = requestAnimationFrame(tick);
  }

  pause() {
    this.playing = false;
    cancelAnimationFrame(this.frame);
  }
}
