// How the site's search ranks: the section whose heading is closest to the question comes first.
function wordsOf(text) {
  const stemmer = new Stemmer();
  const words = splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word));
  return new Set(words.map((word) => stemmer.stemWord(word)));
}

// From 0, no word in common, to 2, the same words.
function closeness(asked, heading) {
  const words = wordsOf(heading);
  const common = [...words].filter((word) => asked.has(word)).length;
  return common && common / asked.size + common / words.size;
}

var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 100,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,

  // result: [page, title, anchor, description, score, file, kind]. A page that is found becomes its closest section.
  score: (result) => {
    const { docnames, titles, alltitles } = Search._index;
    const asked = wordsOf(new URLSearchParams(window.location.search).get("q") ?? "");
    const page = docnames.indexOf(result[0]);
    let best = 0;
    for (const [heading, places] of Object.entries(alltitles)) {
      for (const [file, id] of places) {
        const found = file === page ? closeness(asked, heading) : 0;
        if (found > best) {
          best = found;
          [result[1], result[2]] = id === null ? [heading, ""] : [`${titles[file]} > ${heading}`, `#${id}`];
        }
      }
    }
    return 1000 * best + result[4];
  },
};
