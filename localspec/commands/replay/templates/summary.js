"use strict";

/* The header: what ran, how fast, where the time went; and the legend. */

function showSummary(answer) {
  const {stats} = answer;
  $("prompt").hidden = !answer.prompt;
  if (answer.prompt) {
    $("prompt-start").textContent = inline(answer.prompt.slice(0, 400));
    $("prompt-text").replaceChildren(
      ...(answer.system ? [element("h3", {}, "System"), element("p", {}, answer.system)] : []),
      element("h3", {}, "User"), element("p", {}, answer.prompt));
  }
  // A recording that was cut short has lost its last line, and with it all of these.
  $("engine").replaceChildren(...[
    ["model", answer.model],
    ["draft", answer.draft.join(" + ") || (answer.model && "none")],
    ["backend", answer.backend],
  ].filter(([, value]) => value).map(([name, value]) => pair(name, value)));

  const plain = stats.estimated_plain_tokens_per_second, faster = stats.estimated_speedup;
  $("figures").replaceChildren(
    figure("speed", `${stats.tokens_per_second.toFixed(1)} tok/s`,
      plain ? `${faster ? `${faster.toFixed(2)} × ` : ""}the estimated ${plain.toFixed(1)} of plain decoding` : ""),
    figure("mean acceptance length", stats.mean_acceptance_length.toFixed(2),
      `${count(stats.completion_tokens, "token")} in ${count(stats.num_rounds, "round")}`),
    figure("acceptance rate", stats.num_draft_tokens ? percent(stats.acceptance_rate) : "–",
      stats.num_draft_tokens ? `${stats.num_accepted_tokens.toLocaleString("en")} of ${count(stats.num_draft_tokens, "guess")}` : "nothing was guessed"),
    timeFigure(stats));
}

function pair(name, value) {
  return element("div", {}, element("dt", {}, name), " ", element("dd", {}, value));
}

function figure(name, value, note) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, element("b", {}, value), " ", element("small", {}, note)));
}

function timeFigure(stats) {
  const parts = [["prompt", stats.seconds_prompt], ...PARTS.map((part) => [part, stats[`seconds_${part}`]])]
    .filter(([, value]) => value !== null);
  const list = parts.map(([part, value]) => element("li", {}, element(`span.key.part-${part}`), `${part} ${seconds(value)}`));
  const first = stats.time_to_first_token_s;
  return element("div.time", {},
    element("dt", {}, "time"),
    element("dd", {}, partsBar(parts), element("ul", {}, ...list,
      ...(first === null ? [] : [element("li", {}, `first token after ${seconds(first)}`)]))));
}

/* Every style that occurs, with how often. */
function showLegend(answer, styles) {
  const found = new Map();
  const add = (style, mark, name, means) => {
    const entry = found.get(name) || {style, mark, name, means, n: 0};
    entry.n++;
    found.set(name, entry);
  };
  for (const round of answer.rounds) {
    for (const token of round.emitted) {
      const {mark, name, means} = KINDS[token.kind];
      if (token.kind === "accepted") add(styles.token(token), mark, `accepted from ${sourceName(token.source)}`, means);
      else add(styles.token(token), mark, name, means);
    }
    for (const guess of round.draft) {
      if (!guess.accepted) add("rejected", "✗", "rejected", "a guess that the target rejected, or one behind such a guess");
    }
  }
  const order = ["accepted s0", "accepted s1", "accepted s2", "accepted s3", "accepted s4", "recovered", "bonus", "plain", "rejected"];
  const entries = [...found.values()].sort((a, b) => order.indexOf(a.style) - order.indexOf(b.style));
  $("legend").replaceChildren(...entries.map(({style, mark, name, means, n}) => {
    const sample = element("span.token", {}, name);
    sample.className += ` ${style}`;
    return element("li", {title: means}, element("span.mark", {"aria-hidden": "true"}, mark), " ", sample, ` ${n.toLocaleString("en")}`);
  }));
}
