/* How the search ranks; Sphinx puts this before its own script. Words of the index come first, each with its entry; pages
that list what stands elsewhere come last. From a file:// address no page can be read for a summary. */
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score(result) {
    const [name, , anchor, , score, , kind] = result;
    if (kind === SearchResultKind.index) {
      const { indexentries, docnames } = Search._index;
      const leads = ([doc, id]) => docnames[doc] === name && `#${id}` === anchor;
      result[3] = Object.keys(indexentries).find((entry) => indexentries[entry].some(leads));
    }
    return name.startsWith("docs/") ? score / 4 : score;
  },
};
