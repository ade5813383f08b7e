// Requests to the server this page came from, event streams, and errors in words.

const KEY = "outrider.key";

// sessionStorage may be switched off; then the key lives as long as the page.
let remembered = "";
export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? remembered;
  } catch {
    return remembered;
  }
}

export function storeKey(key) {
  remembered = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Remembered above.
  }
}

/** What went wrong, as a sentence for a person; `status` is HTTP's, or 0 if there was no answer. `code`: the server's. */
export class ServerProblem extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const GONE = "The server cannot be reached. Is “outrider serve” still running?";

export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = storedKey();
  if (key) headers["Authorization"] = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    // A key with characters that no header can carry fails here too, before anything is sent.
    if (key && !/^[\x21-\x7e]+$/.test(key)) throw new ServerProblem("The API key has characters that no key can have.", 401);
    throw new ServerProblem(GONE, 0);
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

async function problemOf(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Not ours: a proxy's page, perhaps.
  }
  return new ServerProblem(inWords(answer, String(error.message ?? "")), answer.status, error.code);
}

function inWords(answer, said) {
  const wait = Number(answer.headers.get("Retry-After"));
  const again = wait > 0 ? ` Try again in ${wait === 1 ? "a second" : `${wait} seconds`}.` : "";
  switch (answer.status) {
    case 401:
      return storedKey() ? "The API key is wrong. Correct it under Settings." : "This server needs an API key. Enter it under Settings.";
    case 429:
      return `The server is overloaded: ${said || "its queue is full"}.${again}`;
    case 503:
      return `The server is not ready: ${said || "it is starting or shutting down"}.${again}`;
    default:
      return `The server refused (${answer.status})${said ? `: ${said}` : ""}.`;
  }
}

/** The events of a stream as objects, until it says it is done or ends. An event with an error is thrown. */
export async function* events(answer, signal) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const data = buffer.slice(0, end).split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        buffer = buffer.slice(end + 2);
        if (!data) continue; // A comment, with which proxies keep a connection open.
        if (data === "[DONE]") return;
        const told = JSON.parse(data);
        if (told.error) throw new ServerProblem(sentence(told.error.message), 200);
        yield told;
      }
    }
  } catch (error) {
    if (signal?.aborted || error instanceof ServerProblem) throw error;
    throw new ServerProblem("The connection broke off. Is “outrider serve” still running?", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}
