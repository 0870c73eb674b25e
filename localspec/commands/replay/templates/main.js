"use strict";

/* Puts the parts together: one player moves all views. */

const recording = JSON.parse($("recording").textContent);
const styles = new Styles();
const player = new Player(update);
const answerView = new AnswerView($("answer"), styles);
const roundView = new RoundView($("round"), styles);
const stripView = new StripView($("strip"), styles, {
  jump: (round) => player.go(player.timeline.done(round)),
  hover: (round, place) => (round === null ? tip.hide() : tip.at(describeRound(answer, round), place)),
});
const tip = new Tip($("tip"), describe);
let answer;

function show(index) {
  answer = recording.answers[index];
  showSummary(answer);
  showLegend(answer, styles);
  answerView.show(answer);
  const empty = answer.rounds.length === 0;
  document.body.classList.toggle("empty", empty);
  if (empty) return;
  const timeline = new Timeline(answer.rounds);
  $("scrubber").max = timeline.total;
  player.load(timeline);
  roundView.show(answer);
  stripView.show(answer, timeline);
  update();
}

/* Why: nothing when an answer was just opened, "go" for a jump, "clock" for a frame. */
function update(why) {
  const {position, timeline, playing} = player;
  answerView.move(position);
  if (why) answerView.follow();
  roundView.move(position);
  if (why === "clock" && player.speed === SLOW) roundView.follow();
  stripView.move(position);
  document.body.classList.toggle("playing", playing);
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");

  const round = position.round + 1, now = timeline.time(position);
  const where = `Round ${round} of ${answer.rounds.length}`;
  $("round-title").textContent = where;
  $("round-time").textContent = `from ${seconds(timeline.starts[position.round] / 1000)}`;
  $("clock").textContent = `${(now / 1000).toFixed(2)} / ${seconds(timeline.total / 1000)}`;
  $("scrubber").value = now;
  $("scrubber").setAttribute("aria-valuetext", `${where}, ${seconds(now / 1000)}`);
  $("so-far").textContent = soFar(position, now);
  if (why === "go") $("said").textContent = playing ? "playing" : `${where}. ${spoken(answer.rounds[position.round])}`;
}

/* How far this answer is, and how far plain decoding would be. */
function soFar(position, now) {
  const tokens = player.timeline.tokens[position.phase === ACCEPT ? position.round + 1 : position.round];
  const plain = answer.stats.estimated_plain_tokens_per_second;
  return count(tokens, "token") + (plain ? `; plain decoding would have about ${Math.floor(now / 1000 * plain)}` : "");
}

function spoken(round) {
  const accepted = round.draft.filter((guess) => guess.accepted).length;
  const guessed = round.draft.length ? `${count(round.draft.length, "guess")}, ${accepted} accepted. ` : "No guesses. ";
  return guessed + "Emitted: " + round.emitted.map((token) => word(token.text)).join(" ");
}

function describe(target) {
  if (target.dataset.why) return {title: target.dataset.why, rows: []};
  return describeToken(answer, Number(target.closest("[data-round]").dataset.round), target.dataset);
}

/* -- controls ------------------------------------------------------------------------------------------------------ */

const keys = {
  " ": () => player.toggle(),
  ArrowLeft: () => player.step(-1),
  ArrowRight: () => player.step(1),
  Home: () => player.go(player.timeline.start),
  End: () => player.go(player.timeline.end),
};
const scrubberKeys = {
  ArrowUp: () => player.step(1),
  ArrowDown: () => player.step(-1),
  PageUp: () => player.step(10),
  PageDown: () => player.step(-10),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || document.body.classList.contains("empty")) return;
  const on = event.target;
  // What already means something where the focus is keeps its meaning.
  if (on.matches("select") || (on.matches("input[type=radio]") && event.key.startsWith("Arrow"))) return;
  if (event.key === " " && on.matches("button, summary, input[type=checkbox]")) return;
  const act = keys[event.key] || (on.id === "scrubber" && scrubberKeys[event.key]);
  if (!act) return;
  event.preventDefault();
  act();
});

$("first").addEventListener("click", keys.Home);
$("back").addEventListener("click", keys.ArrowLeft);
$("play").addEventListener("click", keys[" "]);
$("forward").addEventListener("click", keys.ArrowRight);
$("last").addEventListener("click", keys.End);
$("scrubber").addEventListener("input", (event) => player.seek(Number(event.target.value)));
$("speeds").addEventListener("change", (event) => { player.speed = Number(event.target.value); });
$("rejects").addEventListener("change", (event) => $("answer").classList.toggle("tidy", !event.target.checked));
$("turn").addEventListener("change", (event) => show(Number(event.target.value)));
$("answer").addEventListener("click", (event) => {
  const round = event.target.closest("[data-round]");
  if (round && getSelection().isCollapsed) player.go(player.timeline.done(Number(round.dataset.round)));
});

/* -- start --------------------------------------------------------------------------------------------------------- */

$("file").textContent = recording.name;
if (recording.name) document.title = `${recording.name} – localspec replay`;
if (recording.damage) {
  $("damage").hidden = false;
  $("damage").textContent = `This recording is shown in part: ${recording.damage}. Its figures count what is shown.`;
}
if (recording.answers.length > 1) {
  $("picker").hidden = false;
  $("turn").append(...recording.answers.map((each, i) => element("option", {value: i}, `${i + 1}  ${inline((each.prompt || each.text || "answer").slice(0, 60))}`)));
}
const first = recording.answers.findIndex((each) => each.rounds.length);
$("turn").value = first;
show(first);
