/** An answer on the page, and what its last event says of its decoding. */

import { Tinter } from "./tint.js";

/** Shows the events of a streamed answer in `element` as they come, in place of what is there. Returns `{text, figures}`. */
export async function showAnswer(element, events) {
  const tinter = new Tinter();
  let text = null;
  let reason = "";
  let figures = null;
  for await (const event of events) {
    if (text === null) element.replaceChildren(); // not before: frame after frame, the page must not flicker
    text ??= "";
    for (const choice of event.choices) {
      const piece = choice.delta.content ?? "";
      text += piece;
      element.append(...tinter.split(piece, choice.logprobs?.content ?? []).map(nodeOf));
      reason = choice.finish_reason ?? reason;
    }
    if (event.metrics) figures = readFigures(event, reason);
  }
  return { text, figures };
}

function nodeOf({ text, drafted }) {
  const node = drafted ? document.createElement("mark") : document.createTextNode("");
  node.textContent = text; // never HTML: a model may write tags
  return node;
}

function readFigures({ metrics, usage }, reason) {
  const speculation = metrics.speculative_decoding;
  return {
    speed: metrics.tokens_per_second,
    tau: speculation?.mean_acceptance_length ?? 1,
    firstToken: metrics.queue_time_ms + metrics.time_to_first_token_ms,
    accepted: speculation && [speculation.num_accepted_draft_tokens, speculation.num_draft_tokens],
    tokens: usage.completion_tokens,
    reason,
  };
}

const ROWS = [
  ["Tokens per second", ({ speed }) => speed?.toFixed(speed < 100 ? 1 : 0)],
  ["Tokens per cycle (τ)", ({ tau }) => tau.toFixed(2)],
  ["First token after", ({ firstToken }) => `${firstToken.toFixed(firstToken < 10 ? 1 : 0)} ms`],
  ["Accepted of drafted", ({ accepted }) => accepted?.join(" of ")],
  ["Tokens", ({ tokens }) => String(tokens)],
  ["Ended by", ({ reason }) => ({ stop: "the model", length: "the limit" })[reason] ?? reason],
];

/** Writes a row for each figure into the body of a table; `all`: of both columns, null where there is none yet. */
export function showFigures(body, all) {
  const rows = ROWS.map(([name, write]) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    const cells = all.map((figures, column) => {
      const cell = document.createElement("td");
      if (column) cell.className = "plain";
      cell.textContent = (figures && write(figures)) || "–";
      return cell;
    });
    row.append(head, ...cells);
    return row;
  });
  body.replaceChildren(...rows);
}

/** What both answers say of each other. */
export function compareAnswers(drafted, plain, temperature) {
  const parts = [];
  if (drafted.text === plain.text) parts.push("Both texts are equal.");
  else parts.push(temperature === 0 ? "The texts differ." : "The texts differ, as samples may.");
  const [fast, slow] = [drafted.figures?.speed, plain.figures?.speed];
  if (fast && slow) parts.push(`With a draft: ${(fast / slow).toFixed(2)} times the tokens per second.`);
  return parts.join(" ");
}
