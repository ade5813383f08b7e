// The wiring of the page: settings, key, conversation, and what is shown when.

import { Answer, seconds, shown } from "./answer.js";
import { ask, events, ServerProblem, storedKey, storeKey } from "./api.js";
import { ChoiceView } from "./choice_view.js";
import { KvView } from "./kv_view.js";

const RETRY_MS = 2000;
const WATCH_MS = 250;
const CHOICE_MS = 1000;
const PAINT_MS = 30;
// Of the time of a long answer, at most a quarter goes into laying it out.
const PAUSE_PER_PAINT = 3;
const at = (name) => document.getElementById(name);

// ---- the server, and its pages ----------------------------------------------------------------------

const kv = new KvView(document);
const choice = new ChoiceView(document);
let watching = null;

function tellServer(text, state) {
  at("server").className = `server ${state}`;
  if (at("server-text").textContent !== text) at("server-text").textContent = text;
  at("kv-state").textContent = state === "good" ? "live" : "not live";
  at("kv").classList.toggle("stale", state !== "good");
}

/** Watches until told to stop; a server that is gone or starting is tried again. */
async function watch() {
  watching?.abort();
  const mine = (watching = new AbortController());
  const { signal } = mine;
  while (!signal.aborted) {
    try {
      const models = await (await ask("v1/models", { signal })).json();
      tellModel(models.data[0]);
      if (models.data[0].chooses_drafts) watchChoice(signal);
      const stream = await ask(`kv/stream?interval_ms=${WATCH_MS}`, { signal });
      for await (const told of events(stream, signal)) {
        tellServer("connected", "good");
        kv.show(told);
      }
      tellServer("server ending", "bad");
    } catch (error) {
      if (signal.aborted) return;
      const words = { 0: "server unreachable", 401: storedKey() ? "API key wrong" : "API key needed", 503: "server not ready" };
      const status = error instanceof ServerProblem ? error.status : -1;
      tellServer(words[status] ?? "cache view unavailable", "bad");
      at("server").title = error.message;
      if (status === 401) {
        askForKey(error.message);
        return; // Until another key is entered.
      }
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** Asks for what the engine chooses, until told to stop or the server is gone: `watch` says so, and begins again. */
async function watchChoice(signal) {
  try {
    while (!signal.aborted) {
      choice.show(await (await ask("speculation", { signal })).json());
      await new Promise((resolve) => setTimeout(resolve, CHOICE_MS));
    }
  } catch (error) {
    if (!signal.aborted && !(error instanceof ServerProblem)) throw error;
  }
}

function tellModel(card) {
  const drafting = card.drafter ? `${card.drafter} drafts up to ${card.num_speculative_tokens} tokens${card.chooses_drafts ? ", as many as pay" : ""}` : "no speculation";
  choice.appear(card.chooses_drafts);
  at("model").textContent = `${card.id} · ${drafting} · ${card.max_model_len.toLocaleString("en")} tokens of context`;
  at("model").title = at("model").textContent;
  at("server").title = "";
  at("speculate").disabled = !card.drafter;
  at("speculate").parentElement.title = card.drafter ? "" : "This server has no drafter";
}

function askForKey(text) {
  tellProblem(text);
  at("key").setAttribute("aria-invalid", "true");
  at("key-state").textContent = storedKey() ? "is wrong" : "is needed";
  at("key").focus();
}

// A hidden page asks for nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? watching?.abort() : watch()));

// ---- the conversation ---------------------------------------------------------------------------------

const conversation = [];
const welcome = at("welcome");
// Where there is a touch screen, focus brings up a keyboard that hides half the page.
const hasKeyboard = matchMedia("(pointer: fine)").matches;
let running = null;
let painting = null;
let pause = PAINT_MS;

function tellProblem(text) {
  const atEnd = isAtEnd();
  at("problem").textContent = text;
  at("problem").classList.toggle("shown", Boolean(text));
  follow(atEnd);
}

function message(role) {
  welcome.remove();
  const element = at("log").appendChild(document.createElement("article"));
  element.className = `message ${role}`;
  element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  return element;
}

/** A number as typed, or undefined where nothing is: the server's own default then holds. */
function number(name) {
  const field = at(name);
  return field.value.trim() === "" ? undefined : field.valueAsNumber;
}

function requestBody() {
  const system = at("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    speculate: at("speculate").checked,
    stream: true,
    stream_options: { include_usage: true },
    return_token_origins: true,
  };
}

function invalidSetting() {
  return ["temperature", "max-tokens", "seed"].map(at).find((field) => !field.checkValidity());
}

async function send() {
  const text = at("prompt").value.trim();
  if (!text || running) return;
  const wrong = invalidSetting();
  if (wrong) {
    tellProblem(`${wrong.labels[0].textContent.trim()}: ${wrong.validationMessage}`);
    wrong.focus();
    return;
  }
  tellProblem("");
  const asked = message("user");
  asked.appendChild(document.createElement("div")).className = "text";
  asked.firstChild.textContent = text;
  conversation.push({ role: "user", content: text });
  at("prompt").value = "";
  const answer = new Answer(message("assistant"));
  const mine = (running = new AbortController());
  setRunning(true);
  follow(true);
  try {
    const stream = await ask("v1/chat/completions", { body: requestBody(), signal: mine.signal });
    for await (const chunk of events(stream, mine.signal)) {
      answer.take(chunk);
      painting ??= setTimeout(paint, pause, answer);
    }
    if (answer.finish === null) throw new ServerProblem("The answer broke off before its end.", 0);
    ended(answer);
  } catch (error) {
    // After a reset there is nothing left to end.
    if (answer.element.isConnected) failed(answer, asked, text, error, mine.signal);
  } finally {
    clearTimeout(painting);
    painting = null;
    pause = PAINT_MS;
    if (running === mine) {
      running = null;
      setRunning(false);
    }
  }
}

function paint(answer) {
  painting = null;
  const begun = performance.now();
  const atEnd = isAtEnd();
  answer.paint();
  tellLive(answer, "writing");
  follow(atEnd);
  pause = Math.max(PAINT_MS, PAUSE_PER_PAINT * (performance.now() - begun));
}

function ended(answer, reason) {
  const atEnd = isAtEnd();
  answer.end(reason);
  conversation.push({ role: "assistant", content: answer.text });
  tellLive(answer, "last answer");
  follow(atEnd);
  at("announce").textContent = `Answer complete, ${answer.tokens} tokens.`;
}

function failed(answer, asked, text, error, signal) {
  if (!signal.aborted) tellFailure(error);
  if (answer.text) {
    ended(answer, signal.aborted ? "stopped" : "broken off");
    return;
  }
  // Nothing came: the question goes back to where it was typed.
  conversation.pop();
  answer.element.remove();
  asked.remove();
  if (!at("prompt").value) at("prompt").value = text;
  at("live-state").textContent = "";
}

function tellFailure(error) {
  if (!(error instanceof ServerProblem)) tellProblem(`The page failed: ${error.message}`);
  else if (error.status === 401) askForKey(error.message);
  else tellProblem(error.code === "context_length_exceeded" && conversation.length > 1 ? `${error.message} Or begin a new chat.` : error.message);
}

function setRunning(is) {
  // A button that is switched off loses the focus; a field that is being typed in keeps it.
  const free = at("composer").contains(document.activeElement) || document.activeElement === document.body;
  at("send").disabled = is;
  at("stop").disabled = !is;
  if (!is && free && hasKeyboard) at("prompt").focus({ preventScroll: true });
}

function tellLive(answer, state) {
  at("live-state").textContent = state;
  at("live-acceptance").textContent = shown(answer.acceptanceLength, 2);
  at("live-rate").textContent = shown(answer.tokensPerSecond, 1);
  at("live-first").textContent = seconds(answer.firstTokenSeconds);
  at("live-tokens").textContent = String(answer.tokens);
  for (const [origin, count] of Object.entries(answer.counts)) at(`count-${origin}`).textContent = String(count);
}

function isAtEnd() {
  const log = at("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

/** Scrolls along, unless the reader has scrolled back. */
function follow(atEnd) {
  if (atEnd) at("log").scrollTop = at("log").scrollHeight;
}

function reset() {
  running?.abort();
  conversation.length = 0;
  at("log").replaceChildren(welcome);
  for (const name of ["live-acceptance", "live-rate", "live-first", "live-tokens"]) at(name).textContent = "–";
  for (const origin of ["accepted", "corrected", "bonus", "plain"]) at(`count-${origin}`).textContent = "";
  at("live-state").textContent = "";
  tellProblem("");
  at("prompt").focus();
}

// ---- what a person does -------------------------------------------------------------------------------

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("reset").addEventListener("click", reset);
for (const example of document.querySelectorAll(".examples button")) {
  example.addEventListener("click", () => {
    at("prompt").value = example.textContent;
    send();
  });
}
at("colours").addEventListener("change", (event) => at("log").classList.toggle("coloured", event.target.checked));
at("key").addEventListener("change", (event) => {
  storeKey(event.target.value.trim());
  at("key").removeAttribute("aria-invalid");
  at("key-state").textContent = "";
  tellProblem("");
  watch();
});

at("key").value = storedKey();
at("log").classList.toggle("coloured", at("colours").checked);
if (hasKeyboard) at("prompt").focus();
watch();
