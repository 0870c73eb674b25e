/* A conversation as data, with all that has ever stood in it: turns, and what stood in their place.

   A turn is {question, answer, others, at}: two messages as they are kept; the lists of turns that stood here instead, each
   of which begins with a turn without others; and as which of them all, from 0, this one came. */

/* The turns of messages as they are kept. A version that begins with an answer has the same question. */
export function turnsOf(messages) {
  const turns = [];
  for (const [i, message] of messages.entries()) {
    if (message.role !== "user") continue;
    const {versions = [], version = 0, ...question} = message;
    const answer = messages[i + 1]?.role === "assistant" ? messages[i + 1] : {role: "assistant", content: ""};
    const others = versions.map((list) => turnsOf(list[0].role === "user" ? list : [question, ...list]));
    turns.push({question, answer, others, at: Math.min(version, others.length)});
  }
  return turns;
}

export function messagesOf(turns) {
  return turns.flatMap(({question, answer, others, at}) => {
    const versions = others.map((list) => {
      const messages = messagesOf(list);
      return sameQuestion(question, messages[0]) ? messages.slice(1) : messages;
    });
    return [versions.length ? {...question, versions, version: at} : question, answer];
  });
}

/* All that stood at the place of the first of some turns, in the order in which it came. */
function family([{others, at, ...first}, ...later]) {
  return others.toSpliced(at, 0, [{...first, others: [], at: 0}, ...later]);
}

/* Such a family, with the one of that number in its place. */
function headed(lists, at) {
  const [first, ...later] = lists[at];
  return [{...first, others: lists.toSpliced(at, 1), at}, ...later];
}

/* Turns with another version, by its number, at the n-th place. */
export function chosen(turns, n, version) {
  return [...turns.slice(0, n), ...headed(family(turns.slice(n)), version)];
}

/* Turns with a new turn at the n-th place; all that stood there stays as a version. */
export function withVersion(turns, n, turn) {
  const lists = [...family(turns.slice(n)), [turn]];
  return [...turns.slice(0, n), ...headed(lists, lists.length - 1)];
}

/* Two states of one conversation, of two tabs say, in one: of mine nothing changes its place, and what only theirs has is
   added; where they part, it becomes a version. */
export function merged(mine, theirs) {
  if (!mine.length || !theirs.length) return mine.length ? mine : theirs;
  const lists = family(mine);
  for (const list of family(theirs)) {
    const [turn, ...later] = list;
    const exact = lists.findIndex(([each]) => isSame(each, turn) && each.answer.content === turn.answer.content);
    const i = exact >= 0 ? exact : lists.findIndex(([each]) => isSame(each, turn));
    if (i < 0) lists.push(list);
    else lists[i] = [fuller(lists[i][0], turn), ...merged(lists[i].slice(1), later)];
  }
  return headed(lists, mine[0].at);
}

function sameQuestion(a, b) {
  return a.content === b.content && JSON.stringify(a.files || []) === JSON.stringify(b.files || []);
}

/* Whether two turns are one: the same question, and as far as both answers go, the same answer. */
function isSame(a, b) {
  const goOn = (one, other) => one.startsWith(other) || other.startsWith(one);
  return sameQuestion(a.question, b.question) && goOn(a.answer.content, b.answer.content)
    && goOn(a.answer.reasoning_content || "", b.answer.reasoning_content || "");
}

/* Mine, or with their answer where that goes on further. */
function fuller(mine, theirs) {
  const length = ({content, reasoning_content: reasoning = ""}) => content.length + reasoning.length;
  const further = length(theirs.answer) - length(mine.answer);
  const ended = mine.answer.finish === "broken" && theirs.answer.finish !== "broken";
  return further > 0 || (further === 0 && ended) ? {...mine, answer: theirs.answer, turn: undefined} : mine;
}
