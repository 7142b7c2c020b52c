// The server, as this page asks it.

/** What a request says. A setting that is not given is left out: the model's own holds. */
export function requestOf(messages, settings, model) {
  const body = { model, stream: true, timings: true, messages: [] };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const { role, content, reasoning } of messages) {
    body.messages.push(reasoning ? { role, content, reasoning_content: reasoning } : { role, content });
  }
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

function headersOf(settings) {
  return settings.key ? { authorization: `Bearer ${settings.key}` } : {};
}

async function refusalOf(response) {
  let said = `the server answered ${response.status}`;
  try {
    said = (await response.json()).error.message;
  } catch { /* something between here and the server has answered */ }
  const wait = response.headers.get("retry-after");
  const error = new Error(wait ? `${said} (it asks to wait ${wait} s)` : said);
  error.status = response.status;
  return error;
}

/** Its model: an id and the longest context. A server that takes any name tells none. */
export async function modelOf(settings) {
  const response = await fetch("v1/models", { headers: headersOf(settings) });
  if (!response.ok) throw await refusalOf(response);
  return (await response.json()).data[0] ?? { id: "any", max_model_len: "?" };
}

/** The chunks of a reply as they come. Throws where the server refuses, fails, or falls silent before the end. */
export async function* chunks(body, settings, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "content-type": "application/json", ...headersOf(settings) },
  });
  if (!response.ok) throw await refusalOf(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("the connection ended before the reply did");
}

/** The data of server-sent events, one line each as this server writes them. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
