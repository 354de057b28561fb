// The tokens of an answer and their probabilities, laid along its text.
//
// A server sends tokens with the text they are of, but an answer's text may come later (what could have become a tool
// call is held back) and some tokens have none (marks around reasoning). So tokens wait here until their text comes.

/** {text, logprob, top: [[text, logprob]]}; a character made of several tokens is one of these, with their sum. */
export class TokenQueue {
  constructor() {
    this.waiting = [];
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // keeps the beginning of a character
    this.parts = 0; // tokens of that character
    this.logprob = 0; // their sum
  }

  /** Of /v1/chat/completions: `choices[0].logprobs.content`. */
  addChat(entries) {
    for (const { bytes, logprob, token, top_logprobs: top } of entries)
      this.add(
        bytes ?? [],
        logprob,
        token,
        top.map((item) => [item.token, item.logprob]),
      );
  }

  /** Of /v1/completions: `choices[0].logprobs`. */
  addText({ tokens, token_logprobs: logprobs, top_logprobs: top }) {
    tokens.forEach((token, i) => this.add(bytesOf(token), logprobs[i], token, Object.entries(top[i] ?? {})));
  }

  add(bytes, logprob, name, top) {
    this.parts += 1;
    this.logprob += logprob ?? 0;
    const text = this.decoder.decode(new Uint8Array(bytes), { stream: true });
    if (bytes.length && !text) return;
    const alone = this.parts === 1;
    if (text) this.waiting.push({ text, name: alone ? name : text, logprob: this.logprob, top: alone ? top : [] });
    this.parts = this.logprob = 0;
  }

  /** Cuts `text` into pieces: tokens, where they are known to stand there, and plain texts. */
  cut(text) {
    const pieces = [];
    while (text) {
      const at = this.waiting.findIndex((token) => text.startsWith(token.text));
      if (at < 0) return [...pieces, { text }];
      const [token] = this.waiting.splice(0, at + 1).slice(-1);
      pieces.push(token);
      text = text.slice(token.text.length);
    }
    return pieces;
  }
}

function bytesOf(token) {
  if (!token.startsWith("bytes:")) return [...new TextEncoder().encode(token)];
  return token
    .slice(6)
    .split("\\x")
    .slice(1)
    .map((pair) => parseInt(pair, 16));
}
