"""For `import hpo`: studies of ordinary classes, what a run comes to, studies to read; `hpo.api` gives them."""
