// One answer: its tokens, each marked by where it came from, and its figures while it is written and after.

const ORIGINS = { accepted: "accepted draft", corrected: "corrected", bonus: "bonus", plain: "plain" };
const REASONS = { stop: "", length: "cut at the most tokens", abort: "stopped" };

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
    this.body = element.appendChild(document.createElement("div"));
    this.body.className = "text";
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
    const added = document.createDocumentFragment();
    for (const token of tokens) {
      this.counts[token.origin] += 1;
      const span = document.createElement("span");
      span.className = `token ${token.origin}`;
      span.textContent = token.text;
      span.title = `${ORIGINS[token.origin]} · token ${token.id}`;
      added.append(span);
    }
    if (!tokens.length && content) added.append(content);
    this.body.append(added);
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
    // For whoever tests or scripts the page.
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
