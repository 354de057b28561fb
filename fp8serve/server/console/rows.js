// Rows of training data that are typed, or come from a conversation: one JSON object a line, or one plain text a line.

const followers = new Set();
const waiting = []; // until the view Fine-tune is first opened

export function addRow(row) {
  const line = JSON.stringify(row);
  if (followers.size === 0) waiting.push(line);
  for (const follower of followers) follower(line);
}

/** Calls `follower` with every line that comes from elsewhere. */
export function onRow(follower) {
  followers.add(follower);
  waiting.splice(0).forEach(follower);
}

/** The rows of a text. Throws an Error that names the line. */
export function rowsOf(text) {
  return text
    .split("\n")
    .map((line, i) => [line, i + 1])
    .filter(([line]) => line.trim())
    .map(([line, number]) => {
      if (!line.trim().startsWith("{")) return { text: line };
      try {
        return JSON.parse(line);
      } catch (error) {
        throw new Error(`Line ${number} is not JSON: ${error.message}.`);
      }
    });
}
