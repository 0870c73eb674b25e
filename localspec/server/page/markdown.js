/* Markdown as elements. The parser's tokens become elements of a few kinds; what is no Markdown, HTML above all, is text. */

import {highlighted} from "./highlight.js";
import MarkdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";
import {element} from "./words.js";

// Without underlined headings, since a paragraph would become one when the line after it comes.
const parser = new MarkdownIt({html: false, linkify: true}).disable(["lheading"]);
parser.linkify.set({fuzzyLink: false, fuzzyEmail: false}); // main.py is a file, not an address in Paraguay
parser.inline.ruler.before("escape", "maths", mathsInLine);
parser.block.ruler.before("fence", "maths_block", mathsBlock, {alt: ["paragraph", "blockquote", "list"]});

const MATHS = [["\\(", "\\)"], ["\\[", "\\]"], ["$$", "$$"], ["$", "$"]];

/* TeX stays as it is written; without this rule, Markdown would take its backslashes and underscores for its own. */
function mathsInLine(state, silent) {
  const {src, pos, posMax} = state;
  const [open, close] = MATHS.find(([mark]) => src.startsWith(mark, pos)) || [];
  if (!open) return false;
  const end = next(state, close, pos + open.length);
  if (end <= pos + open.length || end + close.length > posMax) return false;
  const tex = src.slice(pos + open.length, end);
  const price = open === "$" && (/^\s|\s$|\n/.test(tex) || /\d/.test(src[end + 1] || "")); // "from $5 to $10"
  if (price) return false;
  if (!silent) Object.assign(state.push("maths", "", 0), {content: tex.trim(), display: open === "$$" || open === "\\["});
  state.pos = end + close.length;
  return true;
}

/* Where a mark next stands in a paragraph, from a place on; Infinity where it does not. What was searched once is
   remembered with the paragraph: of a thousand marks that open and never close, each would search to the end. */
function next(state, mark, from) {
  const known = (state.marks ??= {})[mark];
  if (known && known.from <= from && from <= known.at) return known.at;
  const at = state.src.indexOf(mark, from);
  return (state.marks[mark] = {from, at: at < 0 ? Infinity : at}).at;
}

function mathsBlock(state, first, last, silent) {
  const line = (n) => state.src.slice(state.bMarks[n] + state.tShift[n], state.eMarks[n]).trim();
  const close = {"$$": "$$", "\\[": "\\]"}[line(first)];
  if (!close) return false;
  // As above: lines in which this nesting has been searched in vain are not searched again.
  const searched = (state.env.searched ??= {}), where = `${close} ${state.level} ${state.blkIndent}`;
  if (searched[where]?.from <= first && first < searched[where].to) return false;
  let end = first + 1;
  while (end < last && line(end) !== close && (state.isEmpty(end) || state.sCount[end] >= state.blkIndent)) end++;
  const closed = end < last && line(end) === close;
  if (!closed && !state.env.more) {
    searched[where] = {from: first, to: end};
    return false; // nobody has closed it, and nobody will
  }
  if (!silent) {
    const token = state.push("maths_block", "", 0);
    token.content = state.getLines(first + 1, end, state.blkIndent, false).trimEnd();
    token.map = [first, closed ? end + 1 : end];
    token.closed = closed;
  }
  state.line = closed ? end + 1 : end;
  return true;
}

/* The blocks of a text: for each its source and, when asked for, its element. more: the text will go on. */
export function blocks(text, more) {
  const lines = text.split("\n");
  const found = [];
  let tokens = [], heading = 2; // the page's own go down to h2
  for (const token of parser.parse(text, {more})) {
    if (token.type === "heading_open") token.depth = heading = Math.min(heading + 1, Number(token.tag[1]) + 2, 6);
    tokens.push(token);
    if (token.level === 0 && token.nesting <= 0) {
      const [from, to] = tokens[0].map;
      const block = tokens;
      found.push({source: `${tokens[0].type} ${tokens[0].depth} ${lines.slice(from, to).join("\n")}`, make: () => filled(block)});
      tokens = [];
    }
  }
  return found;
}

function filled(tokens) {
  const root = element("div");
  fill(root, tokens);
  return root.firstChild;
}

function fill(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.hidden) continue; // the paragraphs of a list without blank lines
    if (token.type === "inline") fill(top, token.children);
    else if (token.nesting > 0) {
      const [outer, inner] = opened(token);
      top.append(outer);
      open.push(inner);
    } else if (token.nesting < 0) open.pop();
    else top.append(leaf(token));
  }
}

const CONTAINERS = new Set(["p", "ul", "ol", "li", "blockquote", "thead", "tbody", "tr", "em", "strong", "s"]);

/* [outermost, innermost] element of an opening token. */
function opened(token) {
  const alone = (made) => [made, made];
  if (token.tag === "table") {
    const table = element("table");
    return [element("div.table", {tabindex: "0", role: "region", "aria-label": "Table"}, table), table];
  }
  if (token.tag === "th" || token.tag === "td") {
    const side = /center|right/.exec(token.attrGet("style") || "")?.[0];
    return alone(element(side ? `${token.tag}.${side}` : token.tag));
  }
  if (token.tag === "a") return alone(link(token.attrGet("href"), []));
  if (token.tag === "ol" && token.attrGet("start")) return alone(element("ol", {start: String(Number(token.attrGet("start")))}));
  if (token.depth) return alone(element(`h${token.depth}`)); // no level is left out, which screen readers rely on
  return alone(element(CONTAINERS.has(token.tag) ? token.tag : "span"));
}

function leaf(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return code(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0].toLowerCase());
    case "code_inline":
      return element("code", {}, token.content);
    case "maths":
      return formula(token.content, token.display, "span") || element("code.maths", {}, token.content);
    case "maths_block":
      return (token.closed && formula(token.content, true, "div")) || element("pre.maths", {tabindex: "0"}, token.content);
    case "hr":
      return element("hr");
    case "hardbreak":
      return element("br");
    case "softbreak":
      return "\n";
    case "image": // is never fetched: that would tell its server that, and what, somebody reads
      return link(token.attrGet("src"), [`image: ${token.content || "without a description"}`]);
    default:
      return token.content;
  }
}

const LONGEST_FORMULA = 5000; // characters

/* TeX as MathML; null where it is none that the renderer knows: then its source is shown. */
function formula(tex, display, kind) {
  if (!globalThis.temml || tex.length > LONGEST_FORMULA) return null;
  const box = element(`${kind}.maths`, display ? {tabindex: "0", role: "region", "aria-label": "Formula", title: tex} : {title: tex});
  try {
    temml.render(tex, box, {displayMode: display, throwOnError: true, maxExpand: 200, maxSize: [20, 20]});
  } catch {
    return null;
  }
  return box;
}

/* Where it leads is shown; only the web and mail can be gone to. */
function link(address, children) {
  let target = null;
  try {
    target = new URL(address);
  } catch {
    // Relative to this page, where there is nothing to go to.
  }
  if (!target || !["http:", "https:", "mailto:"].includes(target.protocol)) return element("span.no-link", {}, ...children);
  return element("a", {href: target.href, title: target.href, target: "_blank", rel: "noopener noreferrer nofollow"}, ...children);
}

function code(text, language) {
  const label = language ? `Code in ${language}` : "Code";
  return element("div.code", {},
    element("div.code-head", {}, element("span", {}, language || "text"),
      element("button.copy", {type: "button", "aria-label": "Copy the code"}, "Copy")),
    element("pre", {tabindex: "0", role: "region", "aria-label": label}, element("code", {}, ...highlighted(text, language))));
}
