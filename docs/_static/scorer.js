// Scores of the site's search: Sphinx's own, with pages for users before pages for developers.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    if (/^(development|benchmarks)\/|^changelog/.test(docname)) return score - 20;
    if (/^(start|guides|cookbook)\//.test(docname)) return score + 2;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Sphinx's own splitting, after other spellings have become the word of the pages: "W&B" would be the letters W and B.
var splitQuery = (query) =>
  query
    .replace(/\bw&b\b|\bweights (&|and) biases\b/gi, "wandb")
    .replace(/\blayer[- ]?wise\b/gi, "per layer")
    .split(/[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu)
    .filter((term) => term);
