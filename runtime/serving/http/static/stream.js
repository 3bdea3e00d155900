/** The server's API: the name of its model, and streamed answers. */

/** What speaks against a request, in the server's words. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function send(address, key, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await orRefusal(fetch(address, { ...options, headers }), "The server cannot be reached.");
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refusal(body?.error?.message ?? `${response.status} ${response.statusText}`, response.status);
}

/** Browsers have words of their own, each another one, for a connection that breaks. */
async function orRefusal(promise, message) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refusal(message);
  }
}

/** What the server calls its model. */
export async function fetchModelName(key) {
  const models = await (await send("v1/models", key)).json();
  return models.data[0].id;
}

/** The events of a streamed answer to the body of a chat request. */
export async function* streamEvents(body, key, signal) {
  const options = { method: "POST", body: JSON.stringify(body), signal };
  const response = await send("v1/chat/completions", key, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await orRefusal(reader.read(), "The connection broke.");
    if (done) throw new Refusal("The connection ended before the answer did.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.message);
      yield event;
    }
  }
}
