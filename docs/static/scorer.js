// How the site's search ranks: a heading that says what somebody asks comes before pages that hold the words somewhere.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 100,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,
};
