/* The conversation. */

import {answer} from "./api.js";
import {Tally} from "./figures.js";
import {AnswerText, following} from "./tokens.js";
import {$, alertIn, element} from "./words.js";

const ENDS = {
  length: "the answer reached its limit",
  cancelled: "stopped",
};

export class Chat {
  /* settings(): how to decode, now. failed(error): hears of errors first; true if it dealt with them. */
  constructor(settings, figures, failed) {
    this.settings = settings;
    this.figures = figures;
    this.failed = failed;
    this.messages = [];
    this.running = null; // the AbortController of the answer that is being made
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    $("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.ask();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("new-chat").addEventListener("click", () => this.startOver());
  }

  async ask() {
    const question = $("question").value.trim();
    if (!question || this.running) return;
    $("question").value = "";
    alertIn($("chat-alert"), "");
    $("welcome").hidden = true;
    const turn = new Turn(question);
    $("talk").append(turn.element);
    $("talk").scrollTop = $("talk").scrollHeight;
    const messages = [...this.messages, {role: "user", content: question}];
    this.enter(new AbortController());
    this.figures.start(this.plainSpeed);
    let error = null;
    try {
      for await (const event of answer(messages, this.settings(), this.running.signal)) {
        following($("talk"), () => turn.take(event));
        if (event.round) this.figures.show(turn.tally, event.round);
        if (event.stats) this.figures.finish(event.stats, event.explanation);
      }
    } catch (thrown) {
      if (thrown.name === "AbortError") turn.finish = "cancelled";
      else error = thrown;
    }
    following($("talk"), () => turn.end());
    if (error && !turn.text) {
      // Nothing was said: the question goes back to where it can be sent again.
      turn.element.remove();
      $("question").value = [question, $("question").value].filter(Boolean).join("\n");
    } else {
      this.messages = [...messages, {role: "assistant", content: turn.text}];
    }
    if (error && !this.failed(error)) alertIn($("chat-alert"), error.message);
    this.enter(null);
  }

  stop() {
    this.running?.abort();
  }

  startOver() {
    this.messages = [];
    $("talk").replaceChildren($("welcome"));
    $("welcome").hidden = false;
    alertIn($("chat-alert"), "");
    this.enter(null);
    $("question").focus();
  }

  enter(running) {
    const hadFocus = document.activeElement === $("stop") || document.activeElement === $("send");
    this.running = running;
    $("talk").ariaBusy = running ? "true" : "false"; // a screen reader reads the answer when it is whole
    $("send").disabled = Boolean(running);
    $("stop").disabled = !running;
    $("new-chat").disabled = Boolean(running) || !this.messages.length;
    if (hadFocus) (running ? $("stop") : $("question")).focus();
  }
}

/* A question and its answer. */
class Turn {
  constructor(question) {
    this.tally = new Tally();
    this.text = "";
    this.finish = null;
    const box = element("div.answer", {dir: "auto"});
    this.answer = new AnswerText(box);
    this.line = element("p.turn-figures", {}, "reading …");
    this.element = element("article.turn", {},
      element("p.question", {dir: "auto"}, element("span.sr", {}, "You: "), question),
      element("span.sr", {}, "Answer: "), box, this.line);
  }

  take(event) {
    if (event.round) {
      this.tally.add(event.round);
      this.answer.add(event.round);
      this.line.textContent = this.tally.line();
    }
    if (event.text) this.text += event.text;
    if (event.finish) this.finish = event.finish;
  }

  end() {
    this.answer.finish();
    const why = ENDS[this.finish];
    this.line.textContent = [this.tally.rounds ? this.tally.line() : "", why].filter(Boolean).join(" · ");
  }
}
