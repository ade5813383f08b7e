// One answer: its tokens, each marked by where it came from, and its figures while it is written and after.
// Taking a token and showing it are apart: however fast tokens come, the browser lays out as often as it can.

const ORIGINS = { accepted: "accepted draft", corrected: "corrected", bonus: "bonus", plain: "plain" };
const REASONS = { stop: "", length: "ended by max tokens", abort: "stopped" };
// A browser lays a block out anew whenever something is added to it. Long answers are several blocks.
const BLOCK_TOKENS = 64;

export class Answer {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.counts = { accepted: 0, corrected: 0, bonus: 0, plain: 0 };
    this.told = null; // metrics and usage, as the server gives them at the end
    this.usage = null;
    this.finish = null;
    this.begun = performance.now();
    this.firstToken = null;
    this.lastToken = null;
    this.pending = [];
    this.body = element.appendChild(document.createElement("div"));
    this.body.className = "text";
    this.block = null;
    this.summary = element.appendChild(document.createElement("div"));
    this.summary.className = "summary";
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.metrics) this.told = chunk.metrics;
    for (const choice of chunk.choices) {
      if (choice.finish_reason) this.finish = choice.finish_reason;
      const tokens = choice.token_origins ?? [];
      this.addTokens(tokens, choice.delta.content ?? "");
    }
  }

  addTokens(tokens, content) {
    this.text += content;
    if (tokens.length) {
      this.lastToken = performance.now();
      this.firstToken ??= this.lastToken;
    }
    for (const token of tokens) this.counts[token.origin] += 1;
    if (tokens.length) this.pending.push(...tokens);
    else if (content) this.pending.push({ text: content });
  }

  /** Shows what has been taken since the last time. */
  paint() {
    for (const { text, origin, id } of this.pending) {
      this.block ??= this.body.appendChild(document.createElement("div"));
      const span = this.block.appendChild(document.createElement("span"));
      span.textContent = text;
      if (origin) {
        span.className = `token ${origin}`;
        span.title = `${ORIGINS[origin]} · token ${id}`;
      }
      // A block that ends with a newline looks, and is copied, as if the next one went on in it.
      if (this.block.childElementCount >= BLOCK_TOKENS && text.endsWith("\n")) this.block = null;
    }
    this.pending = [];
  }

  get tokens() {
    return Object.values(this.counts).reduce((sum, count) => sum + count, 0);
  }

  /** With the target's own token counted; while the answer is written, from what has been shown. */
  get acceptanceLength() {
    if (this.told) return this.told.speculative_decoding.drafts ? this.told.speculative_decoding.acceptance_length : null;
    const drafts = this.counts.corrected + this.counts.bonus;
    return drafts ? 1 + this.counts.accepted / drafts : null;
  }

  /** Of the decoding: what follows the first token, over the time since it. */
  get tokensPerSecond() {
    const seconds = (this.lastToken - this.firstToken) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  get firstTokenSeconds() {
    return this.firstToken === null ? null : (this.firstToken - this.begun) / 1000;
  }

  /** The line below the answer. `reason`: why it ended, where the server did not say. */
  end(reason) {
    this.paint();
    const drafted = this.told?.speculative_decoding;
    const parts = [
      [String(this.tokens), this.tokens === 1 ? "token" : "tokens"],
      [shown(this.tokensPerSecond, 1), "tokens/s"],
      [seconds(this.firstTokenSeconds), "to the first token"],
    ];
    if (this.acceptanceLength !== null) parts.push([shown(this.acceptanceLength, 2), "acceptance length"]);
    if (drafted?.drafts) parts.push([`${drafted.accepted_tokens} of ${drafted.draft_tokens}`, "drafts accepted"]);
    const cached = this.usage?.prompt_tokens_details.cached_tokens;
    if (this.usage) parts.push([`${cached} of ${this.usage.prompt_tokens}`, "prompt tokens cached"]);
    for (const [value, name] of parts) {
      const part = document.createElement("span");
      const number = document.createElement("b");
      number.textContent = value;
      part.append(number, ` ${name}`);
      this.summary.append(part);
    }
    const why = reason ?? REASONS[this.finish] ?? this.finish;
    if (why) this.summary.append(why);
    // For tests and scripts that drive the page.
    this.element.dataset.counts = JSON.stringify(this.counts);
    if (this.told) this.element.dataset.metrics = JSON.stringify(this.told);
  }
}

export function shown(value, digits) {
  return value === null ? "–" : value.toFixed(digits);
}

export function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}
