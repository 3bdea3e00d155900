/** Which characters of a text a draft proposed. */

const SPACE = 0x20;
const REPLACEMENT = [0xef, 0xbf, 0xbd]; // U+FFFD stands for bytes that are no character

/**
 * Follows the tokens of an answer through its text.
 *
 * A text is not its tokens joined: white space at the beginning and special tokens are left out of it. So tokens only tint
 * the text where they match it, byte by byte, and never add to it.
 */
export class Tinter {
  #tokens = [];

  /** The next piece of text with the tokens that it came with, as runs `{text, drafted}`; joined, they are the text. */
  split(text, entries) {
    this.#tokens.push(...entries.map(({ bytes, drafted }) => ({ bytes, drafted })));
    const drafted = this.#follow(new TextEncoder().encode(text));
    const runs = [];
    let end = 0;
    for (const character of text) {
      end += byteLength(character);
      const tinted = drafted[end - 1]; // of several tokens that share a character the last one counts
      if (runs.at(-1)?.drafted !== tinted) runs.push({ text: "", drafted: tinted });
      runs.at(-1).text += character;
    }
    return runs;
  }

  /** For each byte, whether its token was drafted. */
  #follow(bytes) {
    const drafted = new Array(bytes.length).fill(false);
    for (let at = 0; at < bytes.length && this.#tokens.length; ) {
      const token = this.#tokens[0];
      const length = Math.min(token.bytes.length, bytes.length - at);
      if (startsWith(bytes.subarray(at), token.bytes.slice(0, length))) {
        drafted.fill(token.drafted, at, at + length);
        at += length;
        token.bytes = token.bytes.slice(length); // the rest comes with the next piece of text
        if (!token.bytes.length) this.#tokens.shift();
      } else if (token.bytes[0] === SPACE) {
        token.bytes = token.bytes.slice(1);
      } else if (bytes[at] === SPACE) {
        at += 1;
      } else if (startsWith(bytes.subarray(at), REPLACEMENT)) {
        at += REPLACEMENT.length;
      } else {
        this.#tokens.shift();
      }
    }
    return drafted;
  }
}

function startsWith(bytes, start) {
  return start.every((byte, at) => bytes[at] === byte);
}

function byteLength(character) {
  const code = character.codePointAt(0);
  return code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
}
